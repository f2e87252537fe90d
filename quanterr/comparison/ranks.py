"""Several processes for one run, as torchrun and srun start them.

Every rank makes the same plan and takes weights that nobody has taken: first those of its own share, then what is
left of the others. Of a huge weight it takes pieces; rank 0 adds them up in the end. Finished weights go to rank 0
through the store, as records. Sums are exact, so the report is that of one process, whoever computed what. Only rank
0 prints and writes.
"""

import threading
import time
import zlib
from collections.abc import Callable, Sequence

from quanterr.comparison.records import packed, unpacked
from quanterr.comparison.scheduler import Part
from quanterr.pairing.plan import ComparedWeight
from quanterr.util.company import LOOK, Company

BATCH = 1 << 18  # characters of records that are sent at once

Take = Callable[[int, ComparedWeight], None]


class Ranks:
    """The ranks of a run, seen from one of them."""

    def __init__(self, company: Company) -> None:
        """They have met."""
        self.company = company
        self.rank, self.world = company.rank, company.world
        self._lock = threading.Lock()
        self._waiting: list[str] = []  # records that are not sent yet
        self._size = 0  # of them, in characters
        self._sent = 0  # batches
        self._read = [0] * company.world  # batches of each rank that were taken in

    def claim(self, key: str) -> bool:
        """Whether this rank is the first that asks for it."""
        return self.company.add(f"claim/{key}", 1) == 1

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
            batch = zlib.compress("\n".join(self._waiting).encode(), 1)
            self.company.set(f"batch/{self.rank}/{self._sent}", batch)
            self._waiting, self._size, self._sent = [], 0, self._sent + 1

    def finish(self, parts: Sequence[Part]) -> None:
        """All that was finished here is sent, and parts of huge weights; ends when rank 0 has what it needs.

        Raises:
            ElsewhereError: always: the result is rank 0's.
        """
        with self._lock:
            self._flush()
        lines = [
            f"{part.task[0]} {part.task[1]} {part.goes} {packed(ComparedWeight(place, sums, None, None))}"
            for part in parts
            for place, sums in enumerate(part.sums)
        ]
        self.company.set(f"parts/{self.rank}", zlib.compress("\n".join(lines).encode(), 1))
        self.company.set(f"done/{self.rank}", b"1")
        self.company.leave()

    def collect(self, take: Take, missing: set[tuple[int, int]], on_wait: Callable[[], None]) -> None:
        """As rank 0: take in what the others send until nothing is ``missing``, or all of them are done.

        Raises:
            QuanterrError: one of them has failed, or does not answer.
        """
        while missing:
            self.company.check()
            over = all(self.company.has(f"done/{other}") for other in range(1, self.world))
            for other in range(1, self.world):
                self._take_from(other, take, missing)
            if over:
                return
            on_wait()
            time.sleep(LOOK)

    def parts(self) -> list[Part]:
        """As rank 0, after all are done: what they have of weights that several have done together."""
        found: dict[tuple[int, tuple[int, int]], Part] = {}
        for other in range(1, self.world):
            if not self.company.has(f"parts/{other}"):
                continue  # nothing was missing any more
            for line in zlib.decompress(self.company.get(f"parts/{other}")).decode().splitlines():
                candidate, number, goes, record = line.split(" ", 3)
                task = int(candidate), int(number)
                part = found.setdefault((other, task), Part(task, int(goes), []))
                part.sums.append(unpacked(0, record).sums)
        return list(found.values())

    def _take_from(self, other: int, take: Take, missing: set[tuple[int, int]]) -> None:
        while self.company.has(key := f"batch/{other}/{self._read[other]}"):
            text = zlib.decompress(self.company.get(key)).decode()
            self.company.delete(key)
            self._read[other] += 1
            for line in text.split("\n"):
                candidate, number, record = line.split(" ", 2)
                place = int(candidate), int(number)
                if place in missing:
                    missing.discard(place)
                    take(place[0], unpacked(place[1], record))
