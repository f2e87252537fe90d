"""The run: workers that read, dequantize and sum up chunks, and hand over finished weights.

One thread per core on the CPU, each with its own buffers, reads just the rows it is about to compute:
they stay in that core's cache, and torch lets go of the interpreter meanwhile. On CUDA a few
threads, each with pinned buffers and a stream of its own, so that one's reading and copying overlaps
with another's arithmetic. What a weight's sums are does not depend on who computed which chunk.
"""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from quanterr.comparison.tasks import Job
from quanterr.comparison.worker import Worker
from quanterr.errors import Interrupted, ResourceError, is_out_of_memory
from quanterr.formats import Weight
from quanterr.metrics.sums import Sums
from quanterr.native import Kernel
from quanterr.pairing.plan import ComparedWeight
from quanterr.tensors.chunks import CPU_CHUNK, CUDA_CHUNK, LEAST_CUDA_CHUNK, Chunk, Cut, split_chunk
from quanterr.util.platform import limit_of_memory, usable_cores
from quanterr.util.processes import this_process
from quanterr.util.text import display
from quanterr.util.waiting import stoppable

CPU = torch.device("cpu")
Result = TypeVar("Result")

CHUNKS_AT_ONCE = 8  # of one weight, that a thread takes in one go
PIECE = 1 << 26  # elements of a larger weight, that one of several processes takes at a time
SMALL = 1 << 17  # elements; of smaller weights Python does most of the work, one thread at a time
READ_AHEAD = 8  # goes
MAX_TORCH_THREADS = 8  # of torch alone: more wait for the interpreter, and are slower
CUDA_THREADS = 4
LOOK_AGAIN = 0.02  # seconds between two looks at how far the workers are
THREAD_ROOM = 10 * 2**20  # bytes: the usual stack of 8 MiB, and thread-local data
TICK = 0.1  # seconds between two looks at the progress


@dataclass(slots=True)
class Progress:
    """How far the run is; written by workers, read by whoever shows it."""

    total_bytes: int
    done_bytes: int = 0
    name: str = ""
    total_weights: int = 0
    done_weights: int = 0


class ChunkRange(NamedTuple):
    """Chunks ``first:stop`` of a task: what a thread takes in one go."""

    number: int
    first: int
    stop: int


class Part(NamedTuple):
    """What one of several processes has of a task."""

    task: tuple[int, int]  # candidate and number of its first job
    goes: int
    sums: list[Sums]  # of each of its pairs


@dataclass(slots=True)
class _Open:
    """A task that is being worked on."""

    missing: int  # goes
    sums: list[Sums]  # of each of its pairs


class Scheduler:
    """Compares the pairs of tasks on a device; :meth:`run` calls back as soon as a pair is finished.

    A task is the pairs of one weight of the original: one in a comparison, one per candidate in a ranking.
    """

    def __init__(
        self,
        tasks: Sequence[Sequence[Job]],
        device: torch.device,
        finish: Callable[[int, ComparedWeight], None],
        outlier: float,
        stop: threading.Event,
        may_move: bool = False,
        kernel: Kernel | None = None,
        claim: Callable[[str], bool] | None = None,
        share: float = 0.0,
    ) -> None:
        """``finish`` is called with the candidate and its finished pair, by worker threads, one at a time.

        ``may_move``: where the device has too little memory even for small chunks, the CPU goes on. ``kernel`` is the
        compiled one, of which only the CPU has any use; None for torch's. ``claim``: asked before each weight of the
        original, or each piece of a huge one, whether this process shall do it; it begins with the weights behind that
        ``share`` of all.
        """
        self.device, self.outlier, self._tasks, self._stop = device, outlier, tasks, stop
        self.size = CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK
        self._may_move, self.moved_at = may_move, ""  # the weight for which the device had no room
        self._finish, self._lock = finish, threading.Lock()
        self._ended = threading.Event()  # ours: the caller's stop is only read
        self._open: dict[int, _Open] = {}
        self._originals = [jobs[0].pair.original for jobs in tasks]
        self._claim = claim
        order = sorted(range(len(tasks)), key=lambda number: _place(self._originals[number]))
        first = int(share * len(order))
        order = order[first:] + order[:first]
        self._large = [number for number in order if self._originals[number].n >= SMALL]
        self._small = [number for number in order if self._originals[number].n < SMALL]
        self._large_ranges, self._small_ranges = self._ranges(self._large), self._ranges(self._small)
        self._taken = 0  # of the large ones
        self._error: BaseException | None = None
        self._nbytes = [sum(weight.nbytes for weight in _weights(jobs)) for jobs in tasks]
        self.progress = Progress(sum(self._nbytes), total_weights=len(tasks))
        self.kernel = kernel
        cores = max(usable_cores() // this_process().local_world, 1)
        cpu_threads = cores if kernel else min(cores, MAX_TORCH_THREADS)
        self.threads = CUDA_THREADS if device.type == "cuda" else cpu_threads
        if not self._large:
            self.threads = 1

    def run(self, on_progress: Callable[[Progress], None]) -> bool:
        """Compare all, or until stopped; ``on_progress`` is called ten times per second.

        Returns whether all are compared. Raises what went wrong in a worker.
        """
        threads_before = torch.get_num_threads()
        _require_room(self.threads + 1)
        workers = [threading.Thread(target=self._work, args=[n == 0], daemon=True) for n in range(self.threads)]
        helper = threading.Thread(target=self._read_ahead if self._claim is None else int, daemon=True)
        started: list[threading.Thread] = []
        with stoppable(lambda: self._stop.is_set() or self._ended.is_set()):
            try:
                for thread in (*workers, helper):
                    thread.start()
                    started.append(thread)
                for worker in workers:
                    while worker.is_alive():
                        on_progress(self.progress)
                        worker.join(TICK)
            finally:
                # Also when this thread is interrupted: the workers stop after their chunk.
                complete = not self._stop.is_set() and self._error is None
                self._ended.set()
                for thread in started:
                    thread.join()
                torch.set_num_threads(threads_before)
        if self._error is not None:
            raise self._error
        on_progress(self.progress)
        return complete

    def _chunks(self, chunk_range: ChunkRange) -> list[Chunk]:
        return Cut(*self._originals[chunk_range.number].matrix, self.size)[chunk_range.first : chunk_range.stop]

    def _ranges(self, numbers: Iterable[int]) -> Iterator[ChunkRange]:
        for number in numbers:
            n = self._n_chunks(number)
            for first, stop in self._claimed(number, n):
                for go in range(first, max(stop, 1), CHUNKS_AT_ONCE):
                    yield ChunkRange(number, go, min(go + CHUNKS_AT_ONCE, n))

    def _claimed(self, number: int, n: int) -> Iterator[tuple[int, int]]:
        """The pieces of a weight's chunks that this process does, the first and the one behind the last."""
        if self._claim is None:
            yield 0, n
            return
        step = max(PIECE // self.size // CHUNKS_AT_ONCE, 1) * CHUNKS_AT_ONCE
        for first in range(0, max(n, 1), step):
            if self._claim(f"{self._tasks[number][0][:2]}/{first}"):
                yield first, min(first + step, n)

    def _n_chunks(self, number: int) -> int:
        return len(Cut(*self._originals[number].matrix, self.size))

    def _n_goes(self, number: int) -> int:
        return -(-self._n_chunks(number) // CHUNKS_AT_ONCE)

    def _next_range(self, small_too: bool) -> ChunkRange | None:
        with self._lock:
            if self._stop.is_set() or self._ended.is_set():
                return None
            chunk_range = next(self._small_ranges, None) if small_too else None
            if chunk_range is None:
                chunk_range = next(self._large_ranges, None)
                self._taken += 1
            if chunk_range is not None:
                self.progress.name = self._tasks[chunk_range.number][0].pair.name
            return chunk_range

    def _work(self, small_too: bool) -> None:
        """What a thread does. Small weights are one thread's: several would only wait for the interpreter."""
        try:
            torch.set_num_threads(1)  # of this thread: torch's own would only wait for each other
            most = max(map(len, self._tasks), default=1)
            worker = Worker(self.device, self.size, self.outlier, most, self.kernel)
            with torch.inference_mode(), worker.stream():
                while (chunk_range := self._next_range(small_too)) is not None:
                    self._do(worker, chunk_range)
        except Interrupted:  # while it waited for a store
            self._ended.set()
        except BaseException as error:  # raised again by run()
            self._error = self._error or _named(error, self.progress.name)
            self._ended.set()

    def _do(self, worker: Worker, chunk_range: ChunkRange) -> None:
        jobs, chunks = self._tasks[chunk_range.number], self._chunks(chunk_range)
        pairs, name = [job.pair for job in jobs], jobs[0].pair.name
        sums = self._with_room(worker, name, lambda: worker.compare(pairs, self._fitting(chunks, worker.size)))
        share = sum(chunk.n for chunk in chunks) / max(self._originals[chunk_range.number].n, 1)
        self.progress.done_bytes += int(share * self._nbytes[chunk_range.number])
        self._finish_all(worker, chunk_range.number, self._merged(chunk_range, sums))

    def _finish_all(self, worker: Worker, number: int, merged: Sequence[Sums]) -> None:
        """Report the pairs of a task of which all sums are there."""
        self.progress.done_weights += bool(merged)
        for place, whole in enumerate(merged):
            job = self._tasks[number][place]
            finish = partial(worker.finish, job.number, job.pair, whole, place)
            finished = self._with_room(worker, job.pair.name, finish)
            with self._lock:
                self._finish(job.candidate, finished)

    def _fitting(self, chunks: list[Chunk], size: int) -> list[Chunk]:
        """The same elements in chunks of at most that size."""
        return chunks if size == self.size else [piece for chunk in chunks for piece in split_chunk(chunk, size)]

    def _with_room(self, worker: Worker, name: str, work: Callable[[], Result]) -> Result:
        """What ``work`` gives; while the device has no room for it, after going over to smaller chunks, or the CPU."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                smaller = self._smaller(worker)
                if smaller is None:
                    raise
            worker.start_over(*smaller)  # outside of the clause above, which keeps tensors alive
            torch.cuda.empty_cache()
            if smaller[0] == CPU:
                self.moved_at = self.moved_at or name

    def _smaller(self, worker: Worker) -> tuple[torch.device, int] | None:
        """Where a worker may need less memory, and with which chunks."""
        if worker.size > LEAST_CUDA_CHUNK:
            return worker.device, max(worker.size // 2, LEAST_CUDA_CHUNK)
        return (CPU, CPU_CHUNK) if self._may_move and worker.device != CPU else None

    def _merged(self, chunk_range: ChunkRange, sums: list[Sums]) -> list[Sums]:
        """The sums of the whole weights, once all of them is there; nothing before."""
        n = self._n_chunks(chunk_range.number)
        if chunk_range.first == 0 and chunk_range.stop == n:
            return sums
        with self._lock:
            return self._added(chunk_range.number, 1, sums)

    def _added(self, number: int, goes: int, sums: Sequence[Sums]) -> list[Sums]:
        """The sums of a whole task, once that many goes more are all of it; nothing before."""
        state = self._open.setdefault(number, _Open(self._n_goes(number), [Sums() for _ in sums]))
        for whole, part in zip(state.sums, sums, strict=True):
            whole.add(part)
        state.missing -= goes
        return [] if state.missing else self._open.pop(number).sums

    def parts(self) -> list[Part]:
        """After the run: what was done here of tasks that other processes have done the rest of."""
        return [
            Part(self._tasks[number][0][:2], self._n_goes(number) - state.missing, state.sums)
            for number, state in self._open.items()
        ]

    def add(self, parts: Iterable[Part]) -> None:
        """After the run: take in what others have of tasks, and finish those that are complete then."""
        numbers = {jobs[0][:2]: number for number, jobs in enumerate(self._tasks)}
        worker = Worker(self.device, self.size, self.outlier, max(map(len, self._tasks), default=1), self.kernel)
        with torch.inference_mode(), worker.stream():
            for part in parts:
                number = numbers[part.task]
                self._finish_all(worker, number, self._added(number, part.goes, part.sums))

    def _read_ahead(self) -> None:
        """Tell the kernel what will be read next, a little before it is; on a warm cache this costs nothing."""
        for n, chunk_range in enumerate(self._ranges(self._large)):
            while n > self._taken + READ_AHEAD:
                if self._ended.wait(LOOK_AGAIN):
                    return
            chunks = Cut(*self._originals[chunk_range.number].matrix, self.size)
            if chunk_range.stop > chunk_range.first:
                for weight in _weights(self._tasks[chunk_range.number]):
                    _will_need(weight, chunks[chunk_range.first], chunks[chunk_range.stop - 1])


def _require_room(threads: int) -> None:
    """Raise OSError where the address space is limited and has no room for threads.

    Without room for its first objects, a thread never reports that it has started, and who waits for it hangs;
    without room for its thread-local data, the loader ends the process with status 127.
    """
    if limit_of_memory() is not None:
        mmap.mmap(-1, threads * THREAD_ROOM).close()


def _weights(jobs: Sequence[Job]) -> list[Weight]:
    """The weight of the original, and those of the candidates."""
    return [jobs[0].pair.original, *(job.pair.quantized for job in jobs)]


def _place(original: Weight) -> tuple[str, int]:
    """Sorts weights as the original's files hold them, so that files are read front to back."""
    return str(original.codes.file.path), original.codes.offset


def _will_need(weight: Weight, first: Chunk, last: Chunk) -> None:
    """The bytes of the elements from the first chunk to the last, if codes are in the order of the elements."""
    codes, cols = weight.codes, weight.matrix[1]
    if codes.n == weight.matrix[0] * cols:
        begin = (first.row * cols + first.col) * codes.nbytes // codes.n
        end = ((last.stop_row - 1) * cols + last.stop_col) * codes.nbytes // codes.n
        codes.file.will_need(codes.offset + begin, end - begin)


def _named(error: BaseException, name: str) -> BaseException:
    """Running out of memory as an error that says where and what to do."""
    if isinstance(error, torch.OutOfMemoryError):
        return ResourceError(f"out of GPU memory at {display(name)}; try --device cpu")
    if is_out_of_memory(error):
        return ResourceError(f"out of memory at {display(name)}; more memory is needed than is available or allowed")
    return error
