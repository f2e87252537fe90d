"""Sums of chunks by the compiled kernel, which decodes codes itself or takes dequantized values."""

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.comparison.kernel import SUMS_ALONE, SumOptions, add_matrices
from quanterr.formats import Values, Weight
from quanterr.formats.shared.decoding import count_rows_at_once, find_decoder, make_code_side
from quanterr.metrics import find_ranks
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.peaks import WINDOW
from quanterr.metrics.sums import RowSums, Sums, WorstPlace, exact
from quanterr.native import ROOM, SUM_BYTES, SUMS, Kernel, RunStruct, SideStruct
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.decoder import Decoder, ElementType
from quanterr.tensors.workspace import Workspace

PRECISE = 1 << 12  # elements below which all sums are float64, as few roundings do not average out

Dequantize = Callable[[Chunk], Values]


class Operand(NamedTuple):
    """One side of a pair: its weight, its buffers, and the function that dequantizes what the kernel cannot decode."""

    weight: Weight
    workspace: Workspace
    dequantize: Dequantize


class NativeSums:
    """The compiled kernel with one thread's buffers."""

    def __init__(self, kernel: Kernel, outlier: float) -> None:
        """Allocate the tables of the kernel; |e| above ``outlier`` counts as an outlier."""
        self.kernel, self._outlier = kernel, outlier
        self._workspace = Workspace(torch.device("cpu"))
        self._counts = torch.zeros((2, ROOM), dtype=torch.int32)
        self._histogram = torch.empty(ROOM, dtype=torch.int64)
        self._sums = ctypes.create_string_buffer(len(SUMS) * SUM_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._workspace.nbytes + self._counts.nbytes + self._histogram.nbytes

    def sums(
        self,
        operands: tuple[Operand, Operand],
        chunks: Sequence[Chunk],
        wanted: SumOptions,
        kept: tuple[int, int] | None,
    ) -> Sums | None:
        """Compute the sums of a few chunks of a pair; None if a file cannot be read to the end.

        ``kept``, two addresses of (r, c) float32, receives the values of both sides; only for weights of one chunk.
        """
        weight = operands[0].weight
        direct = [find_decoder(operand.weight, chunks) for operand in operands]
        whole = chunks[0].stop_col - chunks[0].col == weight.matrix[1]
        if all(direct) and whole:
            chunks = [Chunk(chunks[0].row, chunks[-1].stop_row, 0, weight.matrix[1])]
        total: Sums | None = None
        for chunk in chunks:
            sums = self._sum_chunk(operands, direct, chunk, wanted, kept)
            if sums is None:
                return None
            if total is None:
                total = sums
            else:
                total.add(sums)
        return total

    def sum_values(self, x: Tensor, y: Tensor, chunk: Chunk, matrix: tuple[int, int]) -> Sums | None:
        """Compute the sums of a chunk from its values x and y, (r, c); ``matrix`` is (rows, cols) of the weight."""
        alive: list[Tensor] = []
        return self._add([_make_value_side(x, alive), _make_value_side(y, alive)], chunk, matrix, len(x))

    def _sum_chunk(
        self,
        operands: tuple[Operand, Operand],
        direct: Sequence[Decoder | None],
        chunk: Chunk,
        wanted: SumOptions,
        kept: tuple[int, int] | None,
    ) -> Sums | None:
        weight = operands[0].weight
        at_once = count_rows_at_once(chunk, direct)
        alive: list[Tensor] = []  # keeps the tensors that the kernel reads alive
        sides, saturated = [], 0
        for place, (operand, decoder) in enumerate(zip(operands, direct, strict=True)):
            if decoder is None:
                values = operand.dequantize(chunk)
                saturated += int(values.saturated) if values.saturated is not None else 0
                side = _make_value_side(values.weight, alive)
            else:
                side = make_code_side(decoder, chunk, at_once, operand.workspace, alive)
            if kept:
                side.values = kept[place]
            sides.append(side)
        sums = self._add(sides, chunk, weight.matrix, at_once, wanted)
        if sums is None:
            return None
        sums.saturated = saturated + sides[1].saturated
        return sums

    def _add(
        self,
        sides: Sequence[SideStruct],
        chunk: Chunk,
        matrix: tuple[int, int],
        at_once: int,
        wanted: SumOptions = SUMS_ALONE,
    ) -> Sums | None:
        r, c = chunk.shape
        run = RunStruct(rows=r, cols=c, rows_at_once=at_once, precise=prod(matrix) < PRECISE, outlier=self._outlier)
        run.normal, run.ranks[:] = wanted.normal, find_ranks(chunk.n)
        if wanted.importance:
            importance = wanted.importance(chunk).float().contiguous()
            run.importance, run.importance_step = importance.data_ptr(), c if importance.shape[0] > 1 else 0
        run.counts, run.histogram = self._counts.data_ptr(), self._histogram.data_ptr()
        run.sums = ctypes.addressof(self._sums)
        rows = self._workspace.buffer("rows", (3, r), torch.float64) if wanted.matrix_rows else None
        if rows is not None:
            run.row_sums = rows.data_ptr()
        peaks = torch.zeros(2, r, -(-c // WINDOW)) if wanted.cells and c == matrix[1] else None
        if peaks is not None:
            run.peaks = peaks.data_ptr()
        if not self.kernel.compare(sides[0], sides[1], run):
            return None
        sums = self._read_sums(run, chunk.n)
        _add_rows(sums, run, chunk, matrix[1])
        if rows is not None:
            add_matrices(sums, [chunk], wanted.matrix_rows, rows)
        if wanted.cells and peaks is not None:
            sums.peaks = [wanted.cells.reduce(peaks, chunk.row)]
        return sums

    def _read_sums(self, run: RunStruct, n: int) -> Sums:
        """Convert the kernel's results for ``n`` elements to Sums."""
        sums = Sums(
            elements=n,
            n=run.n,
            nonfinite_original=run.nonfinite_x,
            nonfinite_quantized=run.nonfinite_y,
            x_nonzero=run.n - run.x_zero,
            zero_reference=run.zero_reference,
            zeroed=run.y_zero - (run.x_zero - run.zero_reference),
            outliers=run.outliers,
            relative_outliers=run.relative_outliers,
            e_max=run.e_max,
            e_min=run.e_min,
            relative_max=run.relative_max,
            x_max=run.x_max,
            cast_max=run.cast_max,
        )
        if run.n:
            bins = dict(zip(run.ranks[:], run.rank_bins[:], strict=True)) if run.n == n else None
            sums.histogram = Histogram(run.zero_errors, self._histogram[: run.n_bins].clone(), run.first_bin, bins)
        stored = memoryview(self._sums)
        for place, name in enumerate(SUMS):
            limbs = stored[place * SUM_BYTES : (place + 1) * SUM_BYTES]
            setattr(sums, name, int.from_bytes(limbs, "little", signed=True))
        return sums


def _add_rows(sums: Sums, run: RunStruct, chunk: Chunk, cols: int) -> None:
    """Add the row with the largest |e| and the few rows with the lowest SNR; all pieces of rows are kept."""
    whole = chunk.shape[1] == cols
    if sums.e_max:
        sums.worst = WorstPlace(sums.e_max, chunk.row + run.worst_row, chunk.col)
    sums.dead_rows = run.dead_rows if whole else 0
    kept = run.kept_rows, run.kept_x_sq, run.kept_e_sq, run.kept_e_max, run.kept_zeroed
    for row, x_sq, e_sq, e_max, zeroed in zip(*(values[: run.n_kept] for values in kept), strict=True):
        sums.rows[chunk.row + row] = RowSums(exact(x_sq), exact(e_sq), e_max, whole, bool(zeroed))


def _make_value_side(values: Tensor, alive: list[Tensor]) -> SideStruct:
    """Make a kernel operand of dequantized values, (r, c)."""
    stored = values.float().contiguous()
    alive.append(stored)
    return SideStruct(element=ElementType.F32, file=-1, row_bytes=4 * stored.shape[1], stored=stored.data_ptr())
