"""The scheduler: worker threads that read, dequantize and sum chunks, and deliver finished weights.

On the CPU there is one thread per core with its own buffers, which reads only the rows that it computes next: they stay
in the core's cache, and torch releases the interpreter meanwhile. On a GPU there are a few threads, each with its own
stream; a ring of pinned slots with readers of its own (tensors/pinned_ring.py) brings their bytes, so that reading and
copying for one overlap with arithmetic of another. The sums of a weight do not depend on which thread computed which
chunk.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from quanterr.comparison.devices import count_own_cores
from quanterr.comparison.tasks import Job
from quanterr.comparison.worker import Worker
from quanterr.errors import Interrupted
from quanterr.formats import Weight
from quanterr.kernel.library import Kernel
from quanterr.lazy_torch import torch
from quanterr.metrics.sums import Sums
from quanterr.pairing.model import Pair, WeightResult
from quanterr.samples.small_weights import MAX_ROUND_WEIGHTS, ROUND_ELEMENTS
from quanterr.tensors.chunks import CPU_CHUNK, DEVICE_CHUNK, MIN_DEVICE_CHUNK, Chunk, Cut, split_chunks
from quanterr.tensors.devices import give_back_device_memory
from quanterr.tensors.pinned_ring import READERS
from quanterr.tensors.pool import map_in_threads
from quanterr.util.background import run_beside
from quanterr.util.memory import name_lack_of_memory, require_memory_for_threads
from quanterr.util.platform import keep_freed_memory
from quanterr.util.waiting import allow_stop

Result = TypeVar("Result")

CHUNKS_AT_ONCE = 4  # chunks of one weight in a range: few, so that several recipes find its rows in the cache
PIECE_ELEMENTS = 1 << 26  # size of the pieces in which several processes share a larger weight
SMALL_ELEMENTS = 1 << 17  # below this size Python takes most of the time, so one thread handles all such weights
RANGES_READ_AHEAD = 8
MAX_TORCH_THREADS = 8  # for the torch kernel: more threads are slower, as they wait for the interpreter
DEVICE_THREADS = 4
POLL_INTERVAL = 0.02  # seconds between two checks of the progress of the workers
# Freed memory to keep for further small weights: getting fresh pages from the system takes longer than arithmetic.
SCRATCH_BYTES = 16 << 20


@dataclass(slots=True)
class Progress:
    """The progress of a run, written by workers and read by progress displays."""

    total_bytes: int
    done_bytes: int = 0
    name: str = ""
    total_weights: int = 0
    done_weights: int = 0


class Claims(NamedTuple):
    """How several processes divide a run: each claims pieces, first those after its ``share`` (0 to 1) of all weights.

    ``claim`` is asked before each weight of the original, or each piece of a huge one.
    """

    claim: Callable[[str], bool]
    share: float


class ChunkRange(NamedTuple):
    """Chunks ``first:stop`` of the ``n`` chunks of task ``number``, which one thread processes at a time."""

    number: int
    first: int
    stop: int
    chunks: Sequence[Chunk]
    n: int


class PartialTask(NamedTuple):
    """The part of a task that this process computed, while other processes computed the rest."""

    task: tuple[int, int]  # candidate and number of its first job
    goes: int  # number of ranges in it
    sums: list[Sums]  # one for each pair in the task


@dataclass(slots=True)
class _OpenTask:
    """An unfinished task."""

    missing: int  # number of ranges still to compute
    sums: list[Sums]  # one for each pair in the task


class Scheduler:
    """A run over tasks on one device, which delivers each pair as soon as it is finished.

    A task has all pairs of one weight of the original: one pair in a comparison, one per candidate in a ranking.
    """

    def __init__(
        self,
        tasks: Sequence[Sequence[Job]],
        device: torch.device,
        finish: Callable[[int, WeightResult], None],
        outlier: float,
        stop: threading.Event,
        may_move: bool = False,
        kernel: Kernel | None = None,
        samples: bool = True,
        claims: Claims | None = None,
    ) -> None:
        """Set up a run.

        ``finish`` is called with a candidate's number and its finished pair, by worker threads, one call at a time.
        ``may_move`` lets the CPU take over if the device has too little memory even for small chunks. ``kernel`` is the
        compiled kernel, which computes on the CPU and examines the samples of all devices, or None for torch's.
        ``samples`` is as for :class:`Worker`. Without ``claims``, this process computes everything.
        """
        self.device, self.outlier, self._tasks, self._stop, self._samples = device, outlier, tasks, stop, samples
        self.size = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
        self._may_move, self.moved_at = may_move, ""  # moved_at: the weight at which the device ran out of memory
        self._finish, self._lock = finish, threading.Lock()
        self._ended = threading.Event()  # set by the scheduler, which never sets the caller's ``stop``
        self._open: dict[int, _OpenTask] = {}
        self._originals = [jobs[0].pair.original for jobs in tasks]
        self._most = max(map(len, tasks), default=1)  # the maximum number of pairs in a task
        self._claims = claims
        places = [(str(weight.codes.file.path), weight.codes.offset) for weight in self._originals]
        order = sorted(range(len(tasks)), key=places.__getitem__)  # files are read from front to back
        first = int(claims.share * len(order)) if claims else 0
        order = order[first:] + order[:first]
        self._large = [number for number in order if self._originals[number].n >= SMALL_ELEMENTS]
        self._small = [number for number in order if self._originals[number].n < SMALL_ELEMENTS]
        self._large_ranges, self._small_ranges = self._iterate_ranges(self._large), self._iterate_ranges(self._small)
        self._taken = 0  # number of large ranges handed out
        self._nbytes = [sum(weight.nbytes for weight in _list_weights(jobs)) for jobs in tasks]
        self.progress = Progress(sum(self._nbytes), total_weights=len(tasks))
        self.kernel = kernel
        cores = count_own_cores()
        cpu_threads = cores if kernel else min(cores, MAX_TORCH_THREADS)
        self.threads = cpu_threads if device.type == "cpu" else DEVICE_THREADS
        ranges = sum(map(self._count_ranges, self._large[: self.threads]))
        self.threads = max(min(self.threads, ranges), 1)

    def run(self, on_progress: Callable[[Progress], None]) -> bool:
        """Compare all pairs, or until stopped; return whether all are compared.

        ``on_progress`` is called ten times per second. The first exception in a worker is raised again.
        """
        if self._small:
            keep_freed_memory(SCRATCH_BYTES, SCRATCH_BYTES)
        require_memory_for_threads(self.threads + 1 + (0 if self.device.type == "cpu" else READERS))
        with ExitStack() as stack:
            stack.enter_context(allow_stop(lambda: self._stop.is_set() or self._ended.is_set()))
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            if self._claims is None:
                stack.enter_context(run_beside(self._read_ahead))
            show = partial(on_progress, self.progress)
            workers = map_in_threads(self._work, range(self.threads), [None] * self.threads, on_wait=show)
            ends = stack.enter_context(workers)
            stack.callback(self._ended.set)  # workers stop after their current range, if this thread is interrupted
            deque(ends, 0)
            return not self._stop.is_set()

    def _iterate_ranges(self, numbers: Iterable[int]) -> Iterator[ChunkRange]:
        for number in numbers:
            chunks = self._cut(number)
            n = len(chunks)
            for first, stop in self._claim_pieces(number, n):
                for go in range(first, max(stop, 1), CHUNKS_AT_ONCE):
                    yield ChunkRange(number, go, min(go + CHUNKS_AT_ONCE, n), chunks, n)

    def _claim_pieces(self, number: int, n: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges (first, stop) of a weight's chunks that this process has claimed."""
        if self._claims is None:
            yield 0, n
            return
        step = max(PIECE_ELEMENTS // self.size // CHUNKS_AT_ONCE, 1) * CHUNKS_AT_ONCE
        for first in range(0, max(n, 1), step):
            if self._claims.claim(f"{self._tasks[number][0][:2]}/{first}"):
                yield first, min(first + step, n)

    def _cut(self, number: int) -> Sequence[Chunk]:
        return Cut(*self._originals[number].matrix, self.size)

    def _count_ranges(self, number: int) -> int:
        return -(-len(self._cut(number)) // CHUNKS_AT_ONCE)

    def _take_next_ranges(self, small_too: bool) -> list[ChunkRange]:
        """Return the next range, or several ranges of small weights; an empty list at the end."""
        with self._lock:
            if self._stop.is_set() or self._ended.is_set():
                return []
            ranges = self._take_small() if small_too else []
            if not ranges:
                ranges = list(islice(self._large_ranges, 1))
                self._taken += 1
            return ranges

    def _take_small(self) -> list[ChunkRange]:
        """Return the next small weights, all of which are compared before any is finished."""
        ranges, n = [], 0
        for chunk_range in islice(self._small_ranges, max(MAX_ROUND_WEIGHTS // self._most, 1)):
            ranges.append(chunk_range)
            n += self._most * self._originals[chunk_range.number].n
            if n >= ROUND_ELEMENTS:
                break
        return ranges

    def _work(self, number: int, buffers: None) -> None:
        """Be one worker. Only the first handles small weights: several would wait for the interpreter."""
        try:
            worker = Worker(self.device, self.size, self.outlier, self._most, self.kernel, self._samples)
            with worker.stream():
                try:
                    self._work_through(worker, small_too=number == 0)
                finally:
                    worker.wait()
        except Interrupted:  # stopped while waiting for a store
            self._ended.set()
        except BaseException as error:
            self._ended.set()  # the other workers stop
            raise name_lack_of_memory(error, self.progress.name) from None

    def _work_through(self, worker: Worker, small_too: bool) -> None:
        """Compare and finish ranges of tasks; small ones are compared by the kernel while others are finished."""
        compared: list[tuple[int, list[Sums]]] = []
        while ranges := self._take_next_ranges(small_too):
            worker.begin([job.pair for span in ranges for job in self._tasks[span.number]])
            self._finish_tasks(worker, compared)
            compared = [(span.number, self._merge(span, self._sum_range(worker, span))) for span in ranges]
        self._finish_tasks(worker, compared)

    def _finish_tasks(self, worker: Worker, compared: Iterable[tuple[int, list[Sums]]]) -> None:
        """Finish tasks until the run is stopped, for instance by a weight that violates a rule."""
        for number, merged in compared:
            if self._stop.is_set():
                break
            self._finish_task(worker, number, merged)

    def _sum_range(self, worker: Worker, chunk_range: ChunkRange) -> list[Sums]:
        """Return the sums of the pairs of a task over a range of chunks."""
        number, first, stop, chunks, n = chunk_range
        jobs = self._tasks[number]
        pairs, name = [job.pair for job in jobs], jobs[0].pair.name
        self.progress.name = name
        sums = self._retry_smaller(worker, name, lambda: self._sum_fitting(worker, pairs, chunks[first:stop]))
        nbytes = self._nbytes[number]
        self.progress.done_bytes += nbytes * stop // max(n, 1) - nbytes * first // max(n, 1)
        return sums

    def _finish_task(self, worker: Worker, number: int, merged: Sequence[Sums]) -> None:
        """Finish and deliver the pairs of a task whose sums are complete."""
        self.progress.done_weights += bool(merged)
        for place, whole in enumerate(merged):
            job = self._tasks[number][place]
            self.progress.name = job.pair.name
            finish = partial(worker.finish, job.number, job.pair, whole, place)
            finished = self._retry_smaller(worker, job.pair.name, finish)
            with self._lock:
                self._finish(job.candidate, finished)

    def _sum_fitting(self, worker: Worker, pairs: Sequence[Pair], chunks: Sequence[Chunk]) -> list[Sums]:
        """Return the sums of pairs over chunks, which are split if the worker has less memory than at the beginning."""
        if worker.size < self.size:
            chunks = split_chunks(chunks, worker.size)
        return worker.sum_chunks(pairs, chunks)

    def _retry_smaller(self, worker: Worker, name: str, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``; when the device is out of memory, retry with smaller chunks, then on CPU."""
        cpu = torch.device("cpu")
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                if worker.size > MIN_DEVICE_CHUNK:
                    device, size = worker.device, max(worker.size // 2, MIN_DEVICE_CHUNK)
                elif self._may_move and worker.device != cpu:
                    device, size = cpu, CPU_CHUNK
                else:
                    raise
            worker.start_over(device, size)  # after the except clause, which keeps tensors alive
            give_back_device_memory(self.device)
            if device == cpu:
                self.moved_at = self.moved_at or name

    def _merge(self, chunk_range: ChunkRange, sums: list[Sums]) -> list[Sums]:
        """Return the sums of the task's weights once they are complete; until then an empty list."""
        if chunk_range.first == 0 and chunk_range.stop == chunk_range.n:
            return sums
        with self._lock:
            return self._add_sums(chunk_range.number, 1, sums)

    def _add_sums(self, number: int, goes: int, sums: Sequence[Sums]) -> list[Sums]:
        """Add the sums of ``goes`` ranges to a task; return its sums once complete, until then an empty list."""
        state = self._open.setdefault(number, _OpenTask(self._count_ranges(number), [Sums() for _ in sums]))
        for whole, part in zip(state.sums, sums, strict=True):
            whole.add(part)
        state.missing -= goes
        return [] if state.missing else self._open.pop(number).sums

    def parts(self) -> list[PartialTask]:
        """Return, after the run, this process's parts of the tasks that it has not computed completely."""
        return [
            PartialTask(self._tasks[number][0][:2], self._count_ranges(number) - state.missing, state.sums)
            for number, state in self._open.items()
        ]

    def add(self, parts: Iterable[PartialTask]) -> None:
        """Add, after the run, parts that other processes have computed, and finish the tasks that become complete."""
        numbers = {jobs[0][:2]: number for number, jobs in enumerate(self._tasks)}
        worker = Worker(self.device, self.size, self.outlier, self._most, self.kernel, self._samples)
        with torch.inference_mode(), worker.stream():
            for part in parts:
                number = numbers[part.task]
                self._finish_task(worker, number, self._add_sums(number, part.goes, part.sums))

    def _read_ahead(self, ended: threading.Event) -> None:
        """Tell the operating system which bytes will be read next; with a warm cache this costs nothing."""
        for n, chunk_range in enumerate(self._iterate_ranges(self._large)):
            while n > self._taken + RANGES_READ_AHEAD:
                if ended.wait(POLL_INTERVAL):
                    return
            number, first, stop, chunks, _ = chunk_range
            if stop > first:
                begin, end = chunks[first], chunks[stop - 1]
                for weight in _list_weights(self._tasks[number]):
                    weight.will_need(begin, end)


def _list_weights(jobs: Sequence[Job]) -> list[Weight]:
    """Return the original's weight, then the weight of each candidate."""
    return [jobs[0].pair.original, *(job.pair.quantized for job in jobs)]
