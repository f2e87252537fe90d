"""Selection of conspicuous rows and cells, from the pass over the whole weight, to inspect beyond its sample."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from statistics import median

from quanterr.formats import Weight
from quanterr.kernel.library import choose_kernel
from quanterr.kernel.structs import MOST_PARTS
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.peaks import WINDOW, CellGrid, compute_shares, join_peaks, select_conspicuous
from quanterr.metrics.sums import Sums
from quanterr.samples.rows import SMALL
from quanterr.tensors.chunks import Chunk

ROW = 2  # a row is conspicuous if its Σe² / Σx² is at least this many times the weight's or the sample's
FAR = 12.0  # root mean squares of the sample's errors from which the largest error is inspected
CELL = 1.25  # a cell is conspicuous if its max |e| / max |x| is this many times the usual value in the sample
MOST_CELLS = 4  # cells selected by the largest ratio, and as many by the largest error


def spans_rows(weight: Weight) -> bool:
    """Return whether scale groups span several rows; sampled rows then hold only parts of groups."""
    return weight.block_size is not None and weight.block_size[0] > 1


def make_cell_grid(weight: Weight) -> CellGrid | None:
    """Return the grid of a weight's scale groups, or of windows in them; None if the weight needs no grid.

    Cells are as wide as a window if groups do not span whole windows.
    """
    if weight.levels is None or weight.encoding == "cast" or weight.rotated:
        return None
    if weight.n <= SMALL and not (weight.matrix_rows or weight.scale_steps):  # sampled completely, and has no runs
        return None
    cols = weight.matrix[1]
    if weight.block_size is None:
        return CellGrid(1, cols) if weight.scale is not None and weight.scale.n > 1 else None
    down, across = weight.block_size
    if weight.matrix_rows % down:
        return None
    return CellGrid(down, cols if across >= cols else across if across % WINDOW == 0 else WINDOW)


def find_run_maxima(weight: Weight, sums: Sums) -> Tensor | None:
    """Return the original's largest magnitude in each run, (runs,); None if there are no runs or it is unknown.

    A run is an expert with one scale, or the groups whose scales share a step.
    """
    size = count_run_cells(weight) if sums.peaks else 0
    if not size:
        return None
    most = join_peaks(sums.peaks)[0].reshape(-1)
    size = min(size, len(most))
    return torch.nn.functional.pad(most, (0, -len(most) % size)).view(-1, size).amax(1)


def count_run_cells(weight: Weight) -> int:
    """Return the number of cells in a run; 0 if there are no runs."""
    cells, steps = make_cell_grid(weight), weight.scale_steps
    if cells is None or cells.rows > 1:
        return 0
    if steps and steps.of_largest and weight.block_size and weight.matrix[1] % cells.cols == 0:
        return steps.shared * weight.block_size[1] // cells.cols
    return weight.matrix_rows if weight.block_size is None else 0


def find_blocks(weight: Weight, rows: Sequence[int]) -> list[Chunk]:
    """Return a few of the scale blocks that contain each of these rows."""
    (down, across), cols = weight.block_size or (1, 1), weight.matrix[1]
    tops = sorted({row // down * down for row in rows if row // down * down + down <= weight.matrix[0]})
    lefts = range(0, cols - across + 1, across)[:MOST_CELLS]
    return [Chunk(top, top + down, left, left + across) for top in tops for left in lefts]


def find_conspicuous_rows(sums: Sums, sample: Attainable) -> list[int]:
    """Return the worst rows with far more error than the weight or its sample, and the row of the largest error.

    The largest error counts if it is far larger than the sample's errors: a few wrong values do not show in a row.
    """
    found = sums.list_rows_above(ROW * sample.least_nmse(sums))
    if sums.worst and sums.worst.row not in found and sums.e_max**2 * sample.n > FAR**2 * sample.e_sq:
        found.append(sums.worst.row)
    return found


def find_conspicuous_cells(weight: Weight, sums: Sums, sample: Sequence[Chunk]) -> list[Chunk]:
    """Return the cells whose max |e| / max |x| is larger than usual in the sample.

    The usual value is the median over the sample's chunks of each chunk's largest ratio, as one chunk may be damaged.
    The error of a quantizer is proportional to a group's largest value, and so is the error of a wrong or zero scale.
    """
    cells = make_cell_grid(weight)
    if cells is None or not sums.peaks or not sample:
        return []
    peaks = join_peaks(sums.peaks)
    least = 0.0
    if weight.levels and weight.levels.mantissa and spans_rows(weight):  # few cells are sampled
        least = 2.0 ** -(weight.levels.mantissa + 1)
    if not _may_stand_out(peaks, _list_parts(cells, tuple(sample)), least):
        return []
    shares = compute_shares(peaks)
    usual = max(median([float(shares[cells.of(chunk)].amax()) for chunk in sample]), least)
    rows, cols = weight.matrix
    found = []
    for down, across in select_conspicuous(peaks, shares, CELL * usual, MOST_CELLS):
        row, col = down * cells.rows, across * cells.cols
        if row + cells.rows <= rows:
            found.append(Chunk(row, row + cells.rows, col, min(col + cells.cols, cols)))
    return found


@lru_cache(maxsize=64)  # weights share their shapes
def _list_parts(cells: CellGrid, sample: tuple[Chunk, ...]) -> tuple[int, ...]:
    """Return the first row of cells of each chunk, its stop row, its first column and its stop column."""
    return tuple(at for chunk in sample for span in cells.of(chunk) for at in (span.start, span.stop))


def _may_stand_out(peaks: Tensor, parts: tuple[int, ...], least: float) -> bool:
    """Return False if the kernel finds quickly, as it usually does, that no cell has a larger ratio than usual."""
    kernel = choose_kernel().kernel
    if kernel is None or len(parts) > 4 * MOST_PARTS:
        return True
    _, down, across = peaks.shape
    peaks, numbers = peaks.contiguous(), (ctypes.c_int64 * len(parts))(*parts)
    given = peaks.data_ptr(), down, across, numbers, len(parts) // 4
    return bool(kernel.library.quanterr_stands_out(*given, least, CELL))
