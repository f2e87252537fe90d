"""Several processes for one run, as torchrun and srun start them: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Every rank makes the same plan and takes weights that nobody has taken: first those of its own share, then what is left
of the others. Finished weights go to rank 0 through the store, as records. Sums are exact, so the report is that of
one process, whoever computed what. Only rank 0 prints and writes.

Nobody waits for what will not come: each rank beats, and one that fails or stops beating ends all others.
"""

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

from quanterr.comparison.records import packed, unpacked
from quanterr.errors import ElsewhereError, QuanterrError, ResourceError, Status, UsageError
from quanterr.pairing.plan import ComparedWeight
from quanterr.util.text import display

BEAT = 1.0  # seconds between two beats
SILENCE = 15.0  # seconds without a beat after which a rank counts as dead
START = 25.0  # seconds in which all ranks have to begin
GOODBYE = 10.0  # seconds that rank 0 waits for the others in the end
LOOK = 0.05  # seconds between two looks at the store
BATCH = 1 << 18  # characters of records that are sent at once

Take = Callable[[int, ComparedWeight], None]


_runs = count()  # all ranks begin the same runs in the same order


@cache
def _store() -> Any:
    """What all ranks share: one for the whole process."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START)))
    return store


class Failed(QuanterrError):
    """What another rank reported."""

    def __init__(self, message: str, status: Status) -> None:
        """With the status of that rank."""
        super().__init__(message)
        self.status = status


class Ranks:
    """The ranks of a run, seen from one of them."""

    def __init__(self, store: Any, rank: int, world: int, stop: threading.Event) -> None:
        """``stop`` is set when the run cannot go on."""
        self.rank, self.world = rank, world
        self._store, self._stop = store, stop
        self._failure: QuanterrError | None = None
        self._ended = threading.Event()
        self._lock, self._waiting, self._sent = threading.Lock(), [], 0  # type: ignore[var-annotated]
        self._size = 0
        self._read = [0] * world  # batches of each rank that were taken in
        self._heard: dict[int, tuple[int, float]] = {}
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    @classmethod
    def of_environment(cls, stop: threading.Event) -> "Ranks | None":
        """The ranks that the environment names; None of a single process.

        Raises:
            UsageError: variables that are no numbers.
            ResourceError: the others cannot be reached.
        """
        try:
            world = int(os.environ.get("WORLD_SIZE", "1"))
            rank = int(os.environ.get("RANK", "0"))
        except ValueError as error:
            raise UsageError(f"RANK and WORLD_SIZE must be whole numbers: {error}") from error
        if world < 2:
            return None
        from torch.distributed.distributed_c10d import PrefixStore

        try:
            store = _store()
        except (RuntimeError, ValueError) as error:
            reason = display(str(error).partition("\n")[0], 300)
            raise ResourceError(f"rank {rank} of {world}: the other ranks cannot be reached: {reason}") from error
        return cls(PrefixStore(f"quanterr/{next(_runs)}", store), rank, world, stop)

    # ---- what all do ----

    def agree(self, run: dict[str, Any]) -> None:
        """Wait until all ranks are here, and see that they have the same inputs and plan.

        Raises:
            QuanterrError: one of them has not, or does not come.
        """
        self._set(f"run/{self.rank}", json.dumps(run).encode())
        deadline = time.monotonic() + START
        for other in range(self.world):
            self._wait(f"run/{other}", deadline, f"rank {other} does not come")
            theirs = json.loads(self._store.get(f"run/{other}"))
            differs = [key for key in run if json.loads(json.dumps(run[key])) != theirs.get(key)]
            if differs:
                raise self._failed(UsageError(f"rank {other} differs from rank {self.rank} in {', '.join(differs)}"))

    def claim(self, key: str) -> bool:
        """Whether this rank is the first that asks for it."""
        with self._talking():
            return int(self._store.add(f"claim/{key}", 1)) == 1

    def check(self) -> None:
        """Raise what has gone wrong elsewhere."""
        if self._failure is not None:
            raise self._failed(self._failure)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Around all of a run: what goes wrong here ends the other ranks too."""
        try:
            yield
        except ElsewhereError:
            raise
        except QuanterrError as error:
            raise self._failed(error) from error
        finally:
            self._ended.set()
            self._beating.join(2 * BEAT)
            if self._failure is not None:
                self._part()

    # ---- rank 1 and above ----

    def send(self, candidate: int, done: ComparedWeight) -> None:
        """Hand a finished weight to rank 0."""
        with self._lock:
            text = f"{candidate} {done.number} {packed(done)}"
            self._waiting.append(text)
            self._size += len(text)
            if self._size >= BATCH:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._set(f"batch/{self.rank}/{self._sent}", zlib.compress("\n".join(self._waiting).encode(), 1))
            self._waiting, self._size, self._sent = [], 0, self._sent + 1

    def finish(self) -> None:
        """All that was finished is sent; returns when rank 0 has what it needs.

        Raises:
            ElsewhereError: always: the result is rank 0's.
        """
        with self._lock:
            self._flush()
        self._set(f"done/{self.rank}", str(self._sent).encode())
        while not self._has("end"):
            self.check()
            time.sleep(LOOK)
        self._part()
        raise ElsewhereError(Status.OK)

    # ---- rank 0 ----

    def collect(self, take: Take, missing: set[tuple[int, int]], on_wait: Callable[[], None]) -> None:
        """Take in what the others send until nothing is ``missing``, or all of them are done.

        Raises:
            QuanterrError: one of them has failed, or does not answer.
        """
        while missing:
            self.check()
            over = all(self._has(f"done/{other}") for other in range(1, self.world))
            for other in range(1, self.world):
                self._take_from(other, take, missing)
            if over:
                return
            on_wait()
            time.sleep(LOOK)

    def _take_from(self, other: int, take: Take, missing: set[tuple[int, int]]) -> None:
        while self._has(key := f"batch/{other}/{self._read[other]}"):
            with self._talking():
                text = zlib.decompress(self._store.get(key)).decode()
                self._store.delete_key(key)
            self._read[other] += 1
            for line in text.split("\n"):
                candidate, number, record = line.split(" ", 2)
                place = int(candidate), int(number)
                if place in missing:
                    missing.discard(place)
                    take(place[0], unpacked(place[1], record))

    def end(self) -> None:
        """Let the others go."""
        self._set("end", b"1")
        self._part()

    def _part(self) -> None:
        """Say goodbye; rank 0 waits a little until all others have: the store may be in its process."""
        with suppress(RuntimeError):
            if self.rank:
                self._store.set(f"bye/{self.rank}", b"1")
                return
            deadline = time.monotonic() + GOODBYE
            while time.monotonic() < deadline and not self._store.check([f"bye/{n}" for n in range(1, self.world)]):
                time.sleep(LOOK)

    # ---- the store ----

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failed(ResourceError("rank 0 does not answer: its store is gone")) from error

    def _set(self, key: str, value: bytes) -> None:
        with self._talking():
            self._store.set(key, value)

    def _has(self, key: str) -> bool:
        with self._talking():
            return bool(self._store.check([key]))

    def _wait(self, key: str, deadline: float, otherwise: str) -> None:
        while not self._has(key):
            self.check()
            if time.monotonic() > deadline:
                raise self._failed(ResourceError(f"{otherwise} within {START:.0f} s"))
            time.sleep(LOOK)

    def _failed(self, error: QuanterrError) -> QuanterrError:
        """Tell the others, and say who prints it: rank 0, or the first of those that are left."""
        self._stop.set()
        told = self._failure
        self._failure = self._failure or error
        if told is None:
            message = str(error) if self.rank == 0 else f"rank {self.rank}: {error}"
            try:
                self._store.set("error", json.dumps({"status": int(error.status), "message": message}).encode())
            except RuntimeError:
                return error if self.rank == 1 else ElsewhereError(Status(error.status))
        return error if self.rank == 0 else ElsewhereError(Status(error.status))

    def _beat(self) -> None:
        """Beat, listen to the others, and to what they report."""
        started = time.monotonic()
        while not self._ended.wait(BEAT):
            try:
                self._store.add(f"beat/{self.rank}", 1)
                if self._store.check(["error"]):
                    found = json.loads(self._store.get("error"))
                    self._give_up(Failed(found["message"], Status(found["status"])))
                    return
                others = range(1, self.world) if self.rank == 0 else (0,)
                silent = next((other for other in others if self._silent(other, started)), None)
            except RuntimeError:
                if not self._ended.is_set():
                    self._give_up(ResourceError("rank 0 does not answer: its store is gone"))
                return
            if silent is not None:
                error = ResourceError(f"rank {silent} does not answer since {SILENCE:.0f} s")
                self._failed(error)
                return

    def _give_up(self, error: QuanterrError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _silent(self, other: int, started: float) -> bool:
        """Whether a rank has stopped beating; one that is done need not."""
        now = time.monotonic()
        if other and self._store.check([f"bye/{other}"]):
            return False
        count = int(self._store.add(f"beat/{other}", 0))
        before, since = self._heard.get(other, (-1, started + START - SILENCE))
        if count != before:
            self._heard[other] = count, now if count else since
            return False
        return now - since > SILENCE
