"""Sums of chunks, computed by the compiled kernel, which decodes codes itself or takes dequantized values."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Thread
from typing import Any, NamedTuple

from quanterr.checkpoints import Entry
from quanterr.checkpoints.fingerprints import sample_places
from quanterr.kernel.decoder import Decoder, ElementType
from quanterr.kernel.decoding import Weight, count_rows_at_once, find_decoder, make_code_side, may_wait
from quanterr.kernel.interpreter import Values
from quanterr.kernel.library import Kernel, choose_kernel
from quanterr.kernel.specification import SUMS_ALONE, SumOptions, add_matrices
from quanterr.kernel.structs import DONE, PLACES, ROOM, SUM_BYTES, SUMS, RunStruct, SideStruct
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics import find_ranks
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.peaks import WINDOW, CellGrid, Peaks
from quanterr.metrics.sums import Sums, WorstPlace
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# With fewer elements, all sums are float64, because the roundings of few elements do not average out.
MIN_FLOAT32_ELEMENTS = 1 << 12

Dequantize = Callable[[Chunk], Values]


class KeptBlocks(NamedTuple):
    """Rows of x from ``first`` on, with their first columns, which the kernel keeps by row, or ``transposed``."""

    values: Tensor  # (rows · cols,) float32
    first: int
    rows: int
    cols: int
    transposed: bool


@dataclass(slots=True)
class KeptRows:
    """Decoded rows of both sides, float32, which the kernel writes to these addresses."""

    addresses: tuple[int, int]
    places: Tensor | None = None  # (rows,) int64: where each row is written, -1 for nowhere; None: in its own place
    blocks: KeptBlocks | None = None
    is_filled: bool = False
    side: SideStruct | None = None  # the quantized side, with its scales; None if the kernel does not decode it
    alive: list[object] = field(default_factory=list)  # memory of these scales


class Operand(NamedTuple):
    """One side of a pair: its weight and its buffers."""

    weight: Weight
    workspace: Workspace
    load: Dequantize | None = None  # dequantizes the weight if the kernel cannot decode it
    again: bool = False  # whether each chunk is read several times in a row
    fingerprinted: Entry | None = None  # a tensor from which the kernel keeps a few bytes if it reads it anyway

    def dequantize(self, chunk: Chunk) -> Values:
        """Return the values of a chunk, for a kernel that cannot decode it."""
        return self.load(chunk) if self.load else self.weight.dequantize(chunk, self.workspace)


class Task(NamedTuple):
    """One chunk of a pair for the kernel, and the buffers that it needs."""

    sides: tuple[SideStruct, SideStruct]
    run: RunStruct
    chunk: Chunk
    cols: int  # number of columns of the whole weight
    wanted: SumOptions
    saturated: int  # codes at an end of their range, apart from those that the kernel counts
    rows: Tensor | None  # (3, r) float64: x², e² and max |e|, for a stack of matrices
    peaks: Peaks | None
    kept: KeptRows | None
    alive: list[object]  # further memory that the kernel reads or writes


class _Call(NamedTuple):
    """Tasks, and the arrays with which the kernel computes them."""

    tasks: Sequence[Task]
    arrays: tuple["ctypes.Array[SideStruct]", "ctypes.Array[SideStruct]", "ctypes.Array[RunStruct]"]


class NativeSums:
    """The compiled kernel with one thread's buffers."""

    def __init__(self, kernel: Kernel, outlier: float) -> None:
        """Allocate the tables of the kernel; |e| above ``outlier`` counts as an outlier."""
        self.kernel, self._outlier = kernel, outlier
        self._counts = torch.zeros((2, ROOM), dtype=torch.int32)
        self._histograms = torch.empty(0, dtype=torch.int64)
        self._sums = bytearray()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._counts.nbytes + self._histograms.nbytes + len(self._sums)

    def sums(
        self,
        operands: tuple[Operand, Operand],
        chunks: Sequence[Chunk],
        wanted: SumOptions,
        kept: KeptRows | None,
    ) -> Sums | None:
        """Compute the sums of a few chunks of a pair; None if a file cannot be read to the end.

        ``kept`` receives values of both sides. It requires that the chunks cover the whole weight, and that there is
        only one chunk or the kernel decodes both sides.
        """
        weight = operands[0].weight
        direct = [find_decoder(operand.weight, chunks) for operand in operands]
        are_whole_rows = chunks[0].stop_col - chunks[0].col == weight.matrix[1]
        if all(direct) and are_whole_rows:
            chunks = [Chunk(chunks[0].row, chunks[-1].stop_row, 0, weight.matrix[1])]
        total: Sums | None = None
        for chunk in chunks:
            results = self.compute([self._prepare(operands, direct, chunk, wanted, kept)])
            if not results:
                return None
            if total is None:
                total = results[0]
            else:
                total.add(results[0])
        return total

    def sum_values(self, x: Tensor, y: Tensor, chunk: Chunk, matrix: tuple[int, int]) -> Sums | None:
        """Compute the sums of a chunk from its values x and y, (r, c); ``matrix`` is (rows, cols) of the weight."""
        alive: list[object] = []
        sides = _make_value_side(x, alive), _make_value_side(y, alive)
        results = self.compute([self._make_task(sides, chunk, matrix, len(x), SUMS_ALONE, 0, alive)])
        return results[0] if results else None

    def prepare_whole(
        self, operands: tuple[Operand, Operand], wanted: SumOptions, keep: Callable[[], KeptRows | None]
    ) -> Task | None:
        """Prepare a whole small pair to be computed together with others; None if it must be computed at once.

        ``keep`` makes the argument ``kept`` of :meth:`sums`.
        """
        rows, cols = operands[0].weight.matrix
        chunk = Chunk(0, rows, 0, cols)
        direct = [find_decoder(operand.weight, [chunk]) for operand in operands]
        if not all(decoder is None or may_wait(decoder) for decoder in direct):
            return None
        return self._prepare(operands, direct, chunk, wanted, keep(), waits=True)

    def _prepare(
        self,
        operands: tuple[Operand, Operand],
        direct: Sequence[Decoder | None],
        chunk: Chunk,
        wanted: SumOptions,
        kept: KeptRows | None,
        waits: bool = False,
    ) -> Task:
        at_once = count_rows_at_once(chunk, direct)
        alive: list[object] = []
        sides, saturated = [], 0
        for place, (operand, decoder) in enumerate(zip(operands, direct, strict=True)):
            if decoder is not None:
                keeps_scales = waits and kept is not None
                side = make_code_side(decoder, chunk, at_once, operand.workspace, alive, operand.again, keeps_scales)
                if decoder.codes is operand.fingerprinted:
                    _sample_bytes(side, decoder.codes, chunk, alive)
            else:
                values = operand.dequantize(chunk)
                saturated += int(values.saturated) if values.saturated is not None else 0
                side = _make_value_side(values.weight.clone() if waits else values.weight, alive)
            if kept:
                side.values = kept.addresses[place]
            sides.append(side)
        x, y = sides
        matrix = operands[0].weight.matrix
        task = self._make_task((x, y), chunk, matrix, at_once, wanted, saturated, alive, kept)
        if kept:
            _keep_rows(task.run, kept)
            kept.side, kept.alive = (y, alive) if direct[1] else (None, [])
        return task

    def _make_task(
        self,
        sides: tuple[SideStruct, SideStruct],
        chunk: Chunk,
        matrix: tuple[int, int],
        at_once: int,
        wanted: SumOptions,
        saturated: int,
        alive: list[object],
        kept: KeptRows | None = None,
    ) -> Task:
        r, c = chunk.shape
        run = RunStruct(
            rows=r, cols=c, rows_at_once=at_once, precise=prod(matrix) < MIN_FLOAT32_ELEMENTS, outlier=self._outlier
        )
        run.normal, run.ranks[:] = wanted.normal, find_ranks(r * c)
        if wanted.importance:
            importance = wanted.importance(chunk).float().contiguous()
            run.importance, run.importance_step = importance.data_ptr(), c if importance.shape[0] > 1 else 0
            alive.append(importance)
        run.counts = self._counts.data_ptr()
        rows = torch.empty((3, r), dtype=torch.float64) if wanted.matrix_rows else None
        if rows is not None:
            run.row_sums = rows.data_ptr()
        peaks = _place_peaks(run, wanted.cells, chunk, alive) if wanted.cells and c == matrix[1] else None
        return Task(sides, run, chunk, matrix[1], wanted, saturated, rows, peaks, kept, alive)

    def compute(self, tasks: Sequence[Task]) -> list[Sums]:
        """Compute the sums of each task in one call of the kernel; empty if a file cannot be read to the end."""
        call = self._make_call(tasks)
        return self._read(call) if self._carry_out(call) else []

    def start(self, tasks: Sequence[Task]) -> Callable[[], list[Sums]]:
        """Start to compute the sums of tasks in a separate thread, as the kernel does not need the interpreter.

        The returned function waits for them and returns the same as :meth:`compute`; until then, nothing else may be
        computed.
        """
        call, done = self._make_call(tasks), []
        thread = Thread(target=lambda: done.append(self._carry_out(call)), daemon=True)
        thread.start()

        def wait() -> list[Sums]:
            thread.join()
            return self._read(call) if done[0] else []

        return wait

    def _carry_out(self, call: "_Call") -> bool:
        """Run the kernel without the interpreter lock; return False if a file could not be read to the end."""
        return bool(self.kernel.library.quanterr_compare(*call.arrays, len(call.tasks)) == DONE)

    def _make_call(self, tasks: Sequence[Task]) -> "_Call":
        """Arrange tasks for the kernel."""
        n = len(tasks)
        if self._histograms.numel() < n * ROOM:
            self._histograms = torch.empty(n * ROOM, dtype=torch.int64)
            self._sums = bytearray(n * len(SUMS) * SUM_BYTES)
        x, y = ((SideStruct * n)(*side) for side in zip(*(task.sides for task in tasks), strict=True))
        runs = (RunStruct * n)(*(task.run for task in tasks))
        runs[0].histogram = self._histograms.data_ptr()
        runs[0].sums = ctypes.addressof(ctypes.c_char.from_buffer(self._sums))
        return _Call(tasks, (x, y, runs))

    def _read(self, call: "_Call") -> list[Sums]:
        """Return the results of a call of the kernel."""
        x, y, runs = call.arrays
        sizes = [run.n_bins for run in runs]
        counts = self._histograms[: sum(sizes)].clone().split_with_sizes(sizes)
        stored, step = memoryview(self._sums), len(SUMS) * SUM_BYTES
        return [
            _read_sums(task, run, sides, task_counts, stored[place * step : (place + 1) * step])
            for place, (task, run, sides, task_counts) in enumerate(
                zip(call.tasks, runs, zip(x, y, strict=True), counts, strict=True)
            )
        ]


def _read_sums(
    task: Task, run: RunStruct, sides: tuple[SideStruct, SideStruct], counts: Tensor, stored: memoryview
) -> Sums:
    """Convert the kernel's results to Sums; ``stored`` has the sums and ``counts`` the histogram."""
    x, y = sides
    starts, elements = range(0, len(SUMS) * SUM_BYTES, SUM_BYTES), task.chunk.n
    totals: Any = {
        name: int.from_bytes(stored[at : at + SUM_BYTES], "little", signed=True)
        for name, at in zip(SUMS, starts, strict=True)
    }
    sums = Sums(
        elements=elements,
        n=run.n,
        nonfinite_original=run.nonfinite_x,
        nonfinite_quantized=run.nonfinite_y,
        x_nonzero=run.n - run.x_zero,
        zero_reference=run.zero_reference,
        zeroed=run.y_zero - (run.x_zero - run.zero_reference),
        outliers=run.outliers,
        relative_outliers=run.relative_outliers,
        saturated=task.saturated + y.saturated,
        **totals,
        e_max=run.e_max,
        e_min=run.e_min,
        relative_max=run.relative_max,
        x_max=run.x_max,
        cast_max=run.cast_max,
    )
    if run.n:
        bins = dict(zip(run.ranks, run.rank_bins, strict=True)) if run.n == elements else None
        sums.histogram = Histogram(run.zero_errors, counts, run.first_bin, bins)
    if x.sampled:
        sums.sampled = ctypes.string_at(x.sampled, PLACES * x.sampled_n)
    _add_rows(sums, run, task.chunk, task.cols)
    if task.rows is not None:
        add_matrices(sums, [task.chunk], task.wanted.matrix_rows, task.rows)
    if task.peaks is not None:
        sums.peaks = [task.peaks]
    if task.kept is not None:
        task.kept.is_filled = True
    return sums


def _place_peaks(run: RunStruct, cells: CellGrid, chunk: Chunk, alive: list[object]) -> Peaks:
    """Return the peaks of a chunk of whole rows, which the kernel fills later."""
    down, across = cells.of(chunk)
    values = torch.empty(2, down.stop - down.start, across.stop)
    windows = -(-chunk.stop_col // WINDOW)
    room = torch.empty(2 * windows)
    alive.append(room)
    run.peaks, run.windows = values.data_ptr(), room.data_ptr()
    run.cell_rows, run.cell_windows = cells.rows, min(-(-cells.cols // WINDOW), windows)
    run.rows_above = chunk.row % cells.rows
    return Peaks(down.start, values)


def _keep_rows(run: RunStruct, kept: KeptRows) -> None:
    """Let the kernel keep rows, at the addresses in the sides."""
    run.places = None if kept.places is None else kept.places.data_ptr()
    if kept.blocks:
        values, run.first_block, run.block_rows, run.block_cols, run.transposed = kept.blocks
        run.block_values = values.data_ptr()


def _add_rows(sums: Sums, run: RunStruct, chunk: Chunk, cols: int) -> None:
    """Add the element with the largest |e| and the few rows with the lowest SNR; parts of rows are all kept."""
    whole = chunk.stop_col - chunk.col == cols
    if sums.e_max:
        place = chunk.row + run.worst_row, chunk.col + run.worst_col
        sums.worst = WorstPlace(sums.e_max, *place, (run.worst_x, run.worst_y))
    sums.dead_rows = run.dead_rows if whole else 0
    kept = run.kept_rows, run.kept_x_sq, run.kept_e_sq, run.kept_e_max, run.kept_zeroed
    sums.keep_rows(chunk.row, zip(*(values[: run.n_kept] for values in kept), strict=True), whole)


def _sample_bytes(side: SideStruct, entry: Entry, chunk: Chunk, alive: list[object]) -> None:
    """Let the kernel keep the bytes that the fingerprint of an entry covers, if it reads the whole entry."""
    if side.file < 0 or chunk.shape[0] * side.row_bytes != entry.nbytes:
        return
    n, places = sample_places(entry)
    room = ctypes.create_string_buffer(PLACES * n)
    side.sampled, side.sampled_n, side.sampled_at[:] = ctypes.addressof(room), n, places
    alive.append(room)


def _make_value_side(values: Tensor, alive: list[object]) -> SideStruct:
    """Make a kernel operand of dequantized values, (r, c)."""
    stored = values.float().contiguous()
    alive.append(stored)
    return SideStruct(element=ElementType.F32, file=-1, row_bytes=4 * stored.shape[1], stored=stored.data_ptr())


def sum_histograms(histograms: Sequence[Histogram]) -> Histogram:
    """Return the sum of histograms, by one call of the kernel if there is one."""
    kernel, total = choose_kernel().kernel, Histogram.empty()
    filled = [histogram for histogram in histograms if histogram.counts.numel()]
    if kernel is None or len(filled) < 2:
        for histogram in histograms:
            total.add(histogram)
        return total
    total.make_room(min(histogram.first for histogram in filled), max(histogram.stop for histogram in filled))
    total.zeros = sum(histogram.zeros for histogram in histograms)
    counts, n = [histogram.counts for histogram in filled], len(filled)
    addresses = (ctypes.c_void_p * n)(*(histogram_counts.data_ptr() for histogram_counts in counts))
    places = (ctypes.c_int64 * n)(*(histogram.first - total.first for histogram in filled))
    sizes = (ctypes.c_int64 * n)(*(histogram_counts.numel() for histogram_counts in counts))
    kernel.library.quanterr_add_counts(total.counts.data_ptr(), addresses, places, sizes, n)
    return total
