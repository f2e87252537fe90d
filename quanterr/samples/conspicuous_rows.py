"""Rows and cells with unusually large errors in the pass over a weight, to inspect in addition to its sample."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from statistics import median

from quanterr.formats import Weight
from quanterr.kernel.library import choose_kernel
from quanterr.kernel.structs import MAX_PARTS
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.peaks import WINDOW, CellGrid, compute_shares, join_peaks, select_conspicuous
from quanterr.metrics.sums import Sums
from quanterr.samples.rows import MAX_COMPLETE_ELEMENTS
from quanterr.tensors.chunks import Chunk

MIN_ROW_RATIO = 2  # a row is conspicuous if its Σe² / Σx² is at least this multiple of the weight's or of the sample's
# The largest error is inspected if it exceeds this multiple of the sample's root mean square error.
MIN_LARGEST_ERROR = 12.0
# A cell is conspicuous if its max |e| / max |x| is larger than this multiple of the sample's usual value.
MIN_CELL_RATIO = 1.25
MAX_CELLS = 4  # number of cells with the largest ratio that are selected, and of those with the largest error


def spans_rows(weight: Weight) -> bool:
    """Return whether scale groups span several rows, so that sampled rows hold only parts of groups."""
    return weight.block_size is not None and weight.block_size[0] > 1


def make_cell_grid(weight: Weight) -> CellGrid | None:
    """Return the grid of a weight's scale groups, or of windows in them; None if the weight needs no grid.

    Cells are as wide as a window if groups do not span whole windows.
    """
    if weight.levels is None or weight.encoding == "cast" or weight.rotated:
        return None
    if weight.n <= MAX_COMPLETE_ELEMENTS and not (
        weight.matrix_rows or weight.scale_steps
    ):  # the whole weight is sampled, without runs of rows
        return None
    cols = weight.matrix[1]
    if weight.block_size is None:
        return CellGrid(1, cols) if weight.scale is not None and weight.scale.n > 1 else None
    down, across = weight.block_size
    if weight.matrix_rows % down:
        return None
    return CellGrid(down, cols if across >= cols else across if across % WINDOW == 0 else WINDOW)


def find_run_maxima(weight: Weight, sums: Sums) -> Tensor | None:
    """Return the original's largest magnitude in each run, (runs,); None if it is unknown or there are no runs.

    A run is an expert with one scale, or the groups whose scales share a step.
    """
    size = count_run_cells(weight) if sums.peaks else 0
    if not size:
        return None
    maxima = join_peaks(sums.peaks)[0].reshape(-1)
    size = min(size, len(maxima))
    return torch.nn.functional.pad(maxima, (0, -len(maxima) % size)).view(-1, size).amax(1)


def count_run_cells(weight: Weight) -> int:
    """Return the number of cells in a run; 0 if there are no runs."""
    cells, steps = make_cell_grid(weight), weight.scale_steps
    if cells is None or cells.rows > 1:
        return 0
    if steps and steps.of_largest and weight.block_size and weight.matrix[1] % cells.cols == 0:
        return steps.shared * weight.block_size[1] // cells.cols
    return weight.matrix_rows if weight.block_size is None else 0


def find_blocks(weight: Weight, rows: Sequence[int]) -> list[Chunk]:
    """Return a few scale blocks for each of these rows, which contain it."""
    (down, across), cols = weight.block_size or (1, 1), weight.matrix[1]
    tops = sorted({row // down * down for row in rows if row // down * down + down <= weight.matrix[0]})
    lefts = range(0, cols - across + 1, across)[:MAX_CELLS]
    return [Chunk(top, top + down, left, left + across) for top in tops for left in lefts]


def find_conspicuous_rows(sums: Sums, sample: Attainable) -> list[int]:
    """Return the rows with far more error than the weight or its sample, and perhaps the row of the largest error.

    The latter is returned if that error is far larger than the sample's: a few wrong values hardly change a row's sum.
    """
    rows = sums.list_rows_above(MIN_ROW_RATIO * sample.min_nmse(sums))
    if sums.worst and sums.worst.row not in rows and sums.e_max**2 * sample.n > MIN_LARGEST_ERROR**2 * sample.e_sq:
        rows.append(sums.worst.row)
    return rows


def find_conspicuous_cells(weight: Weight, sums: Sums, sample: Sequence[Chunk]) -> list[Chunk]:
    """Return the cells whose max |e| / max |x| is larger than usual in the sample.

    The usual value is the median over the sample's chunks of each chunk's largest ratio, as one chunk may be damaged.
    The error of a quantizer is proportional to a group's largest value, and so is the error of a wrong or zero scale.
    """
    cells = make_cell_grid(weight)
    if cells is None or not sums.peaks or not sample:
        return []
    peaks = join_peaks(sums.peaks)
    minimum = 0.0
    if weight.levels and weight.levels.mantissa and spans_rows(weight):  # few cells are sampled
        minimum = 2.0 ** -(weight.levels.mantissa + 1)
    if not _may_stand_out(peaks, _list_parts(cells, tuple(sample)), minimum):
        return []
    shares = compute_shares(peaks)
    usual = max(median([float(shares[cells.of(chunk)].amax()) for chunk in sample]), minimum)
    rows, cols = weight.matrix
    chunks = []
    for down, across in select_conspicuous(peaks, shares, MIN_CELL_RATIO * usual, MAX_CELLS):
        row, col = down * cells.rows, across * cells.cols
        if row + cells.rows <= rows:
            chunks.append(Chunk(row, row + cells.rows, col, min(col + cells.cols, cols)))
    return chunks


@lru_cache(maxsize=64)  # cached, as many weights have the same shapes
def _list_parts(cells: CellGrid, sample: tuple[Chunk, ...]) -> tuple[int, ...]:
    """Return, for each chunk, its first and stop row of cells, and its first and stop column of cells."""
    return tuple(at for chunk in sample for span in cells.of(chunk) for at in (span.start, span.stop))


def _may_stand_out(peaks: Tensor, parts: tuple[int, ...], minimum: float) -> bool:
    """Return False if no cell has a larger ratio than usual, which the kernel can check quickly."""
    kernel = choose_kernel().kernel
    if kernel is None or len(parts) > 4 * MAX_PARTS:
        return True
    _, down, across = peaks.shape
    peaks, numbers = peaks.contiguous(), (ctypes.c_int64 * len(parts))(*parts)
    given = peaks.data_ptr(), down, across, numbers, len(parts) // 4
    return bool(kernel.library.quanterr_stands_out(*given, minimum, MIN_CELL_RATIO))
