"""One run in several processes (ranks), as torchrun and srun start them.

Every rank computes the same pairing and claims weights that no rank has claimed: first in its own share, then among the
rest. A huge weight is claimed in pieces, which rank 0 adds up at the end. Finished weights go to rank 0 through the
store, as records. Sums are exact, so a single process would make the same report. Only rank 0 prints and writes.
"""

import threading
import time
import zlib
from collections.abc import Callable, Sequence

from quanterr.comparison.records import pack, unpack
from quanterr.comparison.scheduler import PartialTask
from quanterr.pairing.model import WeightResult
from quanterr.util.rank_group import POLL_SECONDS, RankGroup

BATCH_CHARACTERS = 1 << 18  # characters of records sent at once

Take = Callable[[int, WeightResult], None]


class Ranks:
    """One rank's exchange of finished weights with the other ranks of a run."""

    def __init__(self, group: RankGroup) -> None:
        """Start with a group whose ranks have joined."""
        self.group = group
        self.rank, self.world = group.rank, group.world
        self._lock = threading.Lock()
        self._waiting: list[str] = []  # records not sent yet
        self._size = 0  # characters of these records
        self._sent = 0  # number of batches sent
        self._read = [0] * group.world  # number of batches received from each rank

    def claim(self, key: str) -> bool:
        """Claim ``key``; return whether this rank is the first to do so."""
        return self.group.add(f"claim/{key}", 1) == 1

    def send(self, candidate: int, done: WeightResult) -> None:
        """Send a finished weight to rank 0, in batches."""
        with self._lock:
            text = f"{candidate} {done.number} {pack(done)}"
            self._waiting.append(text)
            self._size += len(text)
            if self._size >= BATCH_CHARACTERS:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            batch = zlib.compress("\n".join(self._waiting).encode(), 1)
            self.group.set(f"batch/{self.rank}/{self._sent}", batch)
            self._waiting, self._size, self._sent = [], 0, self._sent + 1

    def finish(self, parts: Sequence[PartialTask]) -> None:
        """Send the remaining records and the parts of huge weights, then wait until rank 0 has everything it needs.

        Raises:
            ElsewhereError: always, as only rank 0 has the result.
        """
        with self._lock:
            self._flush()
        lines = [
            f"{part.task[0]} {part.task[1]} {part.goes} {pack(WeightResult(place, sums, None, None))}"
            for part in parts
            for place, sums in enumerate(part.sums)
        ]
        self.group.set(f"parts/{self.rank}", zlib.compress("\n".join(lines).encode(), 1))
        self.group.set(f"done/{self.rank}", b"1")
        self.group.leave()

    def collect(self, take: Take, missing: set[tuple[int, int]], on_wait: Callable[[], None]) -> None:
        """Receive weights, on rank 0, until none is ``missing`` or all other ranks are done.

        Raises:
            QuanterrError: another rank has failed, or does not respond.
        """
        while missing:
            self.group.check()
            over = all(self.group.has(f"done/{other}") for other in range(1, self.world))
            for other in range(1, self.world):
                self._take_from(other, take, missing)
            if over:
                return
            on_wait()
            time.sleep(POLL_SECONDS)

    def parts(self) -> list[PartialTask]:
        """Return the parts of weights that several ranks computed; rank 0 calls it after all ranks are done."""
        by_task: dict[tuple[int, tuple[int, int]], PartialTask] = {}
        for other in range(1, self.world):
            if not self.group.has(f"parts/{other}"):
                continue  # this rank had nothing left to send
            for line in zlib.decompress(self.group.get(f"parts/{other}")).decode().splitlines():
                candidate, number, goes, record = line.split(" ", 3)
                task = int(candidate), int(number)
                part = by_task.setdefault((other, task), PartialTask(task, int(goes), []))
                part.sums.append(unpack(0, record).sums)
        return list(by_task.values())

    def _take_from(self, other: int, take: Take, missing: set[tuple[int, int]]) -> None:
        while self.group.has(key := f"batch/{other}/{self._read[other]}"):
            text = zlib.decompress(self.group.get(key)).decode()
            self.group.delete(key)
            self._read[other] += 1
            for line in text.split("\n"):
                candidate, number, record = line.split(" ", 2)
                place = int(candidate), int(number)
                if place in missing:
                    missing.discard(place)
                    take(place[0], unpack(place[1], record))
