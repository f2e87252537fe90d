"""The store that the ranks of a run share, and whether all of them are still there.

Nobody waits for what will not come: each rank beats, and one that fails or stops beating ends all others.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

from quanterr.errors import ElsewhereError, QuanterrError, ResourceError, Status, UsageError
from quanterr.util.processes import Process, this_process
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

BEAT = 1.0  # seconds between two beats
SILENCE = 12.0  # seconds without a beat after which a rank counts as dead
START = 40.0  # seconds from its own begin in which a rank has to see all others
GOODBYE = 5.0  # seconds that rank 0 waits for the others in the end
LOOK = 0.05  # seconds between two looks at the store

_runs = count()  # all ranks begin the same runs in the same order


@cache
def _shared(process: Process) -> Any:
    """The store of all runs of this process.

    Raises:
        ResourceError: the other ranks cannot be reached.
    """
    from torch.distributed.rendezvous import rendezvous

    deadline = time.monotonic() + START
    own = f"rank {process.rank} of {process.world}"
    if process.rank:
        _wait_for_rank_0(own, deadline)
    try:
        limit = timedelta(seconds=max(deadline - time.monotonic(), 1))
        store, _, _ = next(rendezvous("env://", process.rank, process.world, timeout=limit))
    except (RuntimeError, ValueError) as error:
        reason = display(str(error).partition("\n")[0], 300)
        raise ResourceError(f"{own}: the other ranks cannot be reached: {reason}") from error
    return store


def _wait_for_rank_0(own: str, deadline: float) -> None:
    """Wait until somebody listens where the ranks meet: torch tries two kinds of addresses, each for the whole time.

    Raises:
        ResourceError: nobody does.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return  # torch names what is missing
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), LOOK)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                where = display(f"{host}:{port}")
                raise ResourceError(f"{own}: nobody listens at {where} within {START:.0f} s: {error}") from error
        time.sleep(LOOK)


class Failed(QuanterrError):
    """What another rank reported."""

    def __init__(self, message: str, status: Status) -> None:
        """With the status of that rank."""
        super().__init__(message)
        self.status = status


class Company:
    """What the ranks of a run tell each other, and who of them is alive."""

    def __init__(self, process: Process, stop: threading.Event) -> None:
        """Meet the others; ``stop`` is set when the run cannot go on.

        Raises:
            ResourceError: they cannot be reached.
        """
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank, self.world = process.rank, process.world
        self._stop, self._deadline = stop, time.monotonic() + START
        self._store: Any = PrefixStore(f"quanterr/{next(_runs)}", _shared(process))
        self._failure: QuanterrError | None = None
        self._ended = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}  # beats of a rank, and since when it has made no more
        with self._talking():
            self._store.add(f"beat/{self.rank}", 1)
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def agree(self, run: JsonObject) -> None:
        """Wait until all ranks are here, and see that they have the same inputs and plan.

        Raises:
            QuanterrError: one of them has not, or does not come.
        """
        text = json.dumps(run)
        own = json.loads(text)
        self.set(f"run/{self.rank}", text.encode())
        for other in range(self.world):
            while not self.has(f"run/{other}"):
                self.check()
                if time.monotonic() > self._deadline:
                    raise self.failed(ResourceError(f"rank {other} does not come within {START:.0f} s"))
                time.sleep(LOOK)
            theirs = json.loads(self.get(f"run/{other}"))
            differs = [key for key in own if own[key] != theirs.get(key)]
            if differs:
                raise self.failed(UsageError(f"rank {other} differs from rank {self.rank} in {', '.join(differs)}"))

    def check(self) -> None:
        """Raise what has gone wrong elsewhere."""
        if self._failure is not None:
            raise self._spoken(self._failure)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Around all of a run: what goes wrong here ends the other ranks too."""
        try:
            yield
        except ElsewhereError:
            raise
        except QuanterrError as error:
            raise self.failed(error) from error
        finally:
            self._ended.set()
            self._beating.join(2 * BEAT)
            if self._failure is not None:
                self.part()

    def leave(self) -> None:
        """As another rank than 0: wait until rank 0 has what it needs.

        Raises:
            ElsewhereError: always: the result is rank 0's.
        """
        while not self.has("end"):
            self.check()
            time.sleep(LOOK)
        self.part()
        raise ElsewhereError(Status.OK)

    def end(self) -> None:
        """As rank 0: let the others go."""
        self.set("end", b"1")
        self.part()

    def part(self) -> None:
        """Say goodbye; rank 0 waits a little until all others have: the store may be in its process."""
        with suppress(RuntimeError):
            if self.rank:
                self._store.set(f"bye/{self.rank}", b"1")
                return
            deadline = time.monotonic() + GOODBYE
            while time.monotonic() < deadline and not self._store.check([f"bye/{n}" for n in range(1, self.world)]):
                time.sleep(LOOK)

    def set(self, key: str, value: bytes) -> None:
        """Write a value for all to see."""
        with self._talking():
            self._store.set(key, value)

    def has(self, key: str) -> bool:
        """Whether somebody has written it."""
        with self._talking():
            return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """What somebody has written; waits for it."""
        with self._talking():
            return bytes(self._store.get(key))

    def add(self, key: str, n: int) -> int:
        """A counter of all ranks, after ``n`` is added to it."""
        with self._talking():
            return int(self._store.add(key, n))

    def delete(self, key: str) -> None:
        """Forget a value."""
        with self._talking():
            self._store.delete_key(key)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.failed(ResourceError("rank 0 does not answer: its store is gone")) from error

    def failed(self, error: QuanterrError) -> QuanterrError:
        """Tell the others; what to raise here: one rank prints it, rank 0 or the first of those that are left."""
        if self._failure is None:
            message = str(error) if self.rank == 0 else f"rank {self.rank}: {error}"
            try:
                self._store.set("error", json.dumps({"status": int(error.status), "message": message}).encode())
            except RuntimeError:
                self._give_up(error)
                return error if self.rank == 1 else ElsewhereError(Status(error.status))
        self._give_up(error)
        return self._spoken(error)

    def _spoken(self, error: QuanterrError) -> QuanterrError:
        return error if self.rank == 0 else ElsewhereError(Status(error.status))

    def _give_up(self, error: QuanterrError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _beat(self) -> None:
        """Beat, listen to the others, and to what they report."""
        others = range(1, self.world) if self.rank == 0 else (0,)
        while not self._ended.wait(BEAT):
            try:
                self._store.add(f"beat/{self.rank}", 1)
                if self._store.check(["error"]):
                    found = json.loads(self._store.get("error"))
                    return self._give_up(Failed(found["message"], Status(found["status"])))
                silent = next((other for other in others if self._is_silent(other)), None)
            except RuntimeError:
                if not self._ended.is_set():
                    self._give_up(ResourceError("rank 0 does not answer: its store is gone"))
                return None
            if silent is not None:
                self.failed(ResourceError(f"rank {silent} does not answer since {SILENCE:.0f} s"))
                return None
        return None

    def _is_silent(self, other: int) -> bool:
        """Whether a rank has stopped beating; one that has not begun is still expected, one that is done need not."""
        now, beats = time.monotonic(), int(self._store.add(f"beat/{other}", 0))
        before, since = self._heard.get(other, (0, now))
        if beats != before:
            self._heard[other] = beats, now
        return bool(beats and beats == before and now - since > SILENCE and not self._store.check([f"bye/{other}"]))


@contextmanager
def company_of_environment(stop: threading.Event) -> Iterator[Company | None]:
    """The ranks that the environment names, around all of a run; None of a single process.

    ``stop`` is set when they cannot go on.

    Raises:
        UsageError: variables that make no sense.
        ResourceError: the others cannot be reached.
    """
    process = this_process()
    if process.world == 1:
        yield None
        return
    company = Company(process, stop)
    with company.reporting():
        yield company
