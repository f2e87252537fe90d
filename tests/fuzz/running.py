"""Runs many inputs of one target in child processes, and saves the inputs that reveal defects.

Input number n is made of Random(n), so each can be made again, even one that ended its process.
"""

import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import NamedTuple, Never

from fuzz.finding import Target

MAX_SAVED = 5  # inputs of one defect
SILENT = 3  # limits of time after which a process that does not come back from a library is ended
MIB = 1 << 20


class Limits(NamedTuple):
    """The time and memory that one input may take."""

    seconds: float = 10
    memory: int = 1024  # MiB, beyond what the process has before the first input


class Found(NamedTuple):
    """The outcomes of all inputs."""

    inputs: int
    seconds: float
    outcomes: Counter[str]
    defects: Counter[str]
    peak: int  # MiB that the largest process grew by


class Hang(BaseException):
    """An input took longer than it may."""


def run(target: Target, n: int, first: int, jobs: int, limits: Limits, saved: Path) -> Found:
    """Run inputs ``first`` to ``first + n``, cut into as many ranges as there are jobs."""
    started = time.monotonic()
    bounds = [first + n * job // jobs for job in range(jobs + 1)]
    workers = [_Worker(target, bounds[job], bounds[job + 1], limits, saved) for job in range(jobs)]
    last_report = started
    while sum(worker.alive() for worker in workers):  # Each worker is asked in turn.
        time.sleep(0.05)
        if time.monotonic() - last_report > 30:
            last_report = time.monotonic()
            done = sum(worker.at - worker.first for worker in workers)
            print(
                f"{target.name}: {done:,} of {n:,}, {done / (last_report - started):,.0f}/s",
                file=sys.stderr,
                flush=True,
            )
    outcomes, defects = (sum((Counter(w.found[key]) for w in workers), Counter()) for key in ("outcomes", "defects"))
    peak = max(worker.found["peak"] for worker in workers)
    return Found(n, time.monotonic() - started, outcomes, defects, peak)


class _Worker:
    """A range of inputs in a process; another process continues after an input that ended it."""

    def __init__(self, target: Target, first: int, stop: int, limits: Limits, saved: Path) -> None:
        self.target, self.first, self.stop, self.limits, self.saved = target, first, stop, limits, saved
        self.found = {"outcomes": Counter(), "defects": Counter(), "peak": 0}
        self._shared = mmap.mmap(-1, 8)
        self._begin(first)

    @property
    def at(self) -> int:
        """The number of the input that the process is checking."""
        return struct.unpack("<q", self._shared[:8])[0]

    def _begin(self, first: int) -> None:
        self._shared[:8] = struct.pack("<q", first)
        self._seen, self._since = first, time.monotonic()
        read, write = os.pipe()
        self._pipe = os.fdopen(read, "rb")
        self._process = os.fork()
        if self._process == 0:
            self._pipe.close()
            _child(self.target, first, self.stop, self.limits, self.saved, self._shared, write)
        os.close(write)

    def alive(self) -> bool:
        """Return True if there is more to do. If an input ended the process, start one after that input."""
        if self._process == 0:
            return False
        process, status = os.waitpid(self._process, os.WNOHANG)
        if process == 0:
            if self.at != self._seen:
                self._seen, self._since = self.at, time.monotonic()
            elif time.monotonic() - self._since > SILENT * self.limits.seconds:
                os.kill(self._process, signal.SIGKILL)
                self._since = time.monotonic()
            return True
        raw = self._pipe.read()
        self._pipe.close()
        self._process = 0
        if raw:
            document = json.loads(raw)
            self.found["outcomes"].update(document["outcomes"])
            self.found["defects"].update(document["defects"])
            self.found["peak"] = max(self.found["peak"], document["peak"])
            return False
        number, how = self.at, os.waitstatus_to_exitcode(status)
        self.found["defects"][f"the process ended with {how}"] += 1
        save(self.saved, self.target, number, self.target.make(Random(number)), f"the process ended with {how}\n")
        if number + 1 < self.stop:
            self._begin(number + 1)
            return True
        return False


def _child(target: Target, first: int, stop: int, limits: Limits, saved: Path, shared: mmap.mmap, pipe: int) -> Never:
    """Check all inputs and send each outcome; nothing is sent for an input that ends the process."""
    outcomes: Counter[str] = Counter()
    defects: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _hangs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = _size_now() + limits.memory * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(first, stop):
        shared[:8] = struct.pack("<q", number)
        raw = target.make(Random(number))
        try:
            signal.setitimer(signal.ITIMER_REAL, limits.seconds)
            try:
                outcomes[target.check(raw)] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (Exception, Hang) as error:
            place = _place(error)
            defects[place] += 1
            if defects[place] <= MAX_SAVED:
                save(saved, target, number, raw, traceback.format_exc())
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    with os.fdopen(pipe, "w") as file:
        json.dump({"outcomes": outcomes, "defects": defects, "peak": peak}, file)
    os._exit(0)


def _hangs(number: int, frame: FrameType | None) -> Never:
    raise Hang("takes too long")


def _size_now() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _place(error: BaseException) -> str:
    """Return the kind of a defect and where it was raised, last in quanterr or in the check."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}: {ascii(str(error))[:120]}"


def save(folder: Path, target: Target, number: int, raw: bytes, told: str) -> None:
    """Write the input, and next to it the exception."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{target.name}-{number}").write_bytes(raw)
    (folder / f"{target.name}-{number}.txt").write_text(told, encoding="utf-8", errors="backslashreplace")


def lines_of(target: Target, result: Found) -> Iterator[str]:
    """Yield the lines of the report about a target."""
    yield (
        f"{target.name}: {result.inputs:,} inputs in {result.seconds:,.0f} s, {result.inputs / result.seconds:,.0f}/s, "
        f"{len(result.outcomes)} outcomes, memory +{result.peak} MiB, {sum(result.defects.values()):,} defects"
    )
    yield from (f"  {times:>9,}  {outcome}" for outcome, times in result.outcomes.most_common())
    yield from (f"  DEFECT {times:,} times: {defect}" for defect, times in result.defects.most_common())
