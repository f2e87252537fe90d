"""The key-value store that the ranks of a run share, and heartbeats that detect a dead rank.

No rank waits forever: all send heartbeats, and if a rank fails or stops sending them, the others end. Only MASTER_ADDR
must be reachable, for the store. gloo's collectives are not used: with them, every node must be reachable at the
address to which its own name resolves, often 127.0.0.1, and a timeout does not distinguish a dead rank from a busy one.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

from quanterr.errors import ElsewhereError, QuanterrError, ResourceError, Status, UsageError
from quanterr.util.background import run_beside
from quanterr.util.processes import Process, this_process
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

HEARTBEAT_SECONDS = 1.0  # between two heartbeats
MAX_SILENCE_SECONDS = 12.0  # a rank without a heartbeat for longer counts as dead
MAX_START_SECONDS = 120.0  # time in which a rank must see all others; a busy node imports slowly
GOODBYE_SECONDS = 5.0  # time that rank 0 waits for the others at the end
POLL_SECONDS = 0.05  # between two polls of the store

_runs = count()  # numbers the runs, which all ranks start in the same order


@cache
def _open_store(process: Process) -> Any:
    """Open the store that all runs of this process share.

    Raises:
        ResourceError: the other ranks cannot be reached.
    """
    from torch.distributed.rendezvous import rendezvous

    deadline = time.monotonic() + MAX_START_SECONDS
    this_rank = f"rank {process.rank} of {process.world}"
    if process.rank:
        _wait_for_rank_0(this_rank, deadline)
    try:
        limit = timedelta(seconds=max(deadline - time.monotonic(), 1))
        store, _, _ = next(rendezvous("env://", process.rank, process.world, timeout=limit))
    except (RuntimeError, ValueError) as error:
        reason = display(str(error).partition("\n")[0], 300)
        raise ResourceError(f"{this_rank}: the other ranks cannot be reached: {reason}") from error
    return store


def _wait_for_rank_0(this_rank: str, deadline: float) -> None:
    """Wait until rank 0 listens at MASTER_ADDR:MASTER_PORT, as torch would wait the full timeout for IPv6 before IPv4.

    Raises:
        ResourceError: nothing listens there within :data:`MAX_START_SECONDS`.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return  # torch's own error names the missing variable
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), POLL_SECONDS)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                where = display(f"{host}:{port}")
                raise ResourceError(
                    f"{this_rank}: nothing listened at {where} within {MAX_START_SECONDS:.0f} s: {error}"
                ) from error
        time.sleep(POLL_SECONDS)


class RankFailure(QuanterrError):
    """An error that another rank reported."""

    def __init__(self, message: str, status: Status) -> None:
        """Keep the message and the exit status of that rank."""
        super().__init__(message)
        self.status = status


class RankGroup:
    """The ranks of one run: their shared store, and a thread that checks which of them are alive."""

    def __init__(self, process: Process, stop: threading.Event) -> None:
        """Join the other ranks; ``stop`` is set when the run cannot go on.

        Raises:
            ResourceError: the other ranks cannot be reached.
        """
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank, self.world = process.rank, process.world
        self._stop, self._deadline = stop, time.monotonic() + MAX_START_SECONDS
        self._store: Any = PrefixStore(f"quanterr/{next(_runs)}", _open_store(process))
        self._failure: QuanterrError | None = None
        self._heard: dict[int, tuple[int, float]] = {}  # rank → number of its heartbeats, and when it last increased
        with self._guard_store():
            self._store.add(f"beat/{self.rank}", 1)

    def agree(self, run: JsonObject) -> None:
        """Wait until all ranks have joined, and check that they have the same inputs and settings.

        Raises:
            QuanterrError: a rank differs, or does not join in time.
        """
        text = json.dumps(run)
        settings = json.loads(text)
        self.set(f"run/{self.rank}", text.encode())
        for other in range(self.world):
            while not self.has(f"run/{other}"):
                self.check()
                if time.monotonic() > self._deadline:
                    raise self.report_failure(
                        ResourceError(f"rank {other} did not join within {MAX_START_SECONDS:.0f} s")
                    )
                time.sleep(POLL_SECONDS)
            theirs = json.loads(self.get(f"run/{other}"))
            differs = [key for key in settings if settings[key] != theirs.get(key)]
            if differs:
                raise self.report_failure(
                    UsageError(f"rank {other} differs from rank {self.rank} in {', '.join(differs)}")
                )

    def check(self) -> None:
        """Raise the error of another rank, if there is one."""
        if self._failure is not None:
            raise self._choose_error(self._failure)

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Send heartbeats during a whole run, in which an error on this rank also ends the other ranks."""
        try:
            with run_beside(self._beat, 2 * HEARTBEAT_SECONDS):
                yield
        except ElsewhereError:
            raise
        except QuanterrError as error:
            raise self.report_failure(error) from error
        finally:
            if self._failure is not None:
                self.say_goodbye()

    def leave(self) -> None:
        """Wait, on a rank other than 0, until rank 0 has all results, then end.

        Raises:
            ElsewhereError: always, as only rank 0 has the result.
        """
        while not self.has("end"):
            self.check()
            time.sleep(POLL_SECONDS)
        self.say_goodbye()
        raise ElsewhereError(Status.OK)

    def gather(self, pack: Callable[[], bytes]) -> Iterator[bytes]:
        """Yield, on rank 0, the result of each other rank; on the others, send the result of ``pack``, and end.

        Raises:
            ElsewhereError: this is not rank 0, which has all results.
            QuanterrError: another rank has failed.
        """
        if self.rank:
            self.set(f"found/{self.rank}", pack())
            self.leave()
        for other in range(1, self.world):
            while not self.has(key := f"found/{other}"):
                self.check()
                time.sleep(POLL_SECONDS)
            yield self.get(key)
            self.delete(key)

    def end(self) -> None:
        """Let the other ranks end; called on rank 0."""
        self.set("end", b"1")
        self.say_goodbye()

    def say_goodbye(self) -> None:
        """Announce that this rank ends; rank 0 waits briefly for the others, as its process may host the store."""
        with suppress(RuntimeError):
            if self.rank:
                self._store.set(f"bye/{self.rank}", b"1")
                return
            deadline = time.monotonic() + GOODBYE_SECONDS
            while time.monotonic() < deadline and not self._store.check([f"bye/{n}" for n in range(1, self.world)]):
                time.sleep(POLL_SECONDS)

    def set(self, key: str, value: bytes) -> None:
        """Write a value that all ranks can read."""
        with self._guard_store():
            self._store.set(key, value)

    def has(self, key: str) -> bool:
        """Return whether a rank has written this key."""
        with self._guard_store():
            return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting until a rank has written it."""
        with self._guard_store():
            return bytes(self._store.get(key))

    def add(self, key: str, n: int) -> int:
        """Add ``n`` to a counter that all ranks share, and return its new value."""
        with self._guard_store():
            return int(self._store.add(key, n))

    def delete(self, key: str) -> None:
        """Remove a key from the store."""
        with self._guard_store():
            self._store.delete_key(key)

    @contextmanager
    def _guard_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.report_failure(ResourceError("rank 0 does not respond: its store is gone")) from error

    def report_failure(self, error: QuanterrError) -> QuanterrError:
        """Report an error to the other ranks, and return the error to raise on this one, as only one rank prints it."""
        if self._failure is None:
            message = str(error) if self.rank == 0 else f"rank {self.rank}: {error}"
            try:
                self._store.set("error", json.dumps({"status": int(error.status), "message": message}).encode())
            except RuntimeError:
                self._give_up(error)
                return error if self.rank == 1 else ElsewhereError(Status(error.status))
        self._give_up(error)
        return self._choose_error(error)

    def _choose_error(self, error: QuanterrError) -> QuanterrError:
        return error if self.rank == 0 else ElsewhereError(Status(error.status))

    def _give_up(self, error: QuanterrError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _beat(self, ended: threading.Event) -> None:
        """Send heartbeats, and watch for errors of other ranks and for missing heartbeats."""
        others = range(1, self.world) if self.rank == 0 else (0,)
        while not ended.wait(HEARTBEAT_SECONDS):
            try:
                self._store.add(f"beat/{self.rank}", 1)
                if self._store.check(["error"]):
                    error = json.loads(self._store.get("error"))
                    return self._give_up(RankFailure(error["message"], Status(error["status"])))
                silent = next((other for other in others if self._is_silent(other)), None)
            except RuntimeError:
                if not ended.is_set():
                    self._give_up(ResourceError("rank 0 does not respond: its store is gone"))
                return None
            if silent is not None:
                self.report_failure(ResourceError(f"rank {silent} has not responded for {MAX_SILENCE_SECONDS:.0f} s"))
                return None
        return None

    def _is_silent(self, other: int) -> bool:
        """Return whether a rank's heartbeat has stopped; ranks that have not started or have ended do not count."""
        now, beats = time.monotonic(), int(self._store.add(f"beat/{other}", 0))
        before, since = self._heard.get(other, (0, now))
        if beats != before:
            self._heard[other] = beats, now
        return bool(
            beats and beats == before and now - since > MAX_SILENCE_SECONDS and not self._store.check([f"bye/{other}"])
        )


@contextmanager
def join_rank_group(stop: threading.Event) -> Iterator[RankGroup | None]:
    """Join the ranks that the environment names for the duration of a run; yield None for a single process.

    ``stop`` is set when the run cannot go on.

    Raises:
        UsageError: the environment variables are invalid.
        ResourceError: the other ranks cannot be reached.
    """
    process = this_process()
    if process.world == 1:
        yield None
        return
    group = RankGroup(process, stop)
    with group.report_errors():
        yield group
