"""Which parts of a weight are looked at beside its sample, as the one pass over all of it shows them."""

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from quanterr.formats import Weight
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.peaks import WINDOW, Cells, conspicuous, joined, largest_share
from quanterr.metrics.sums import Sums, as_float, ratio, worst_rows
from quanterr.tensors.chunks import Chunk

ROW = 2  # times the relative error of its weight, or of the sample: a row that is looked at
CELL = 1.25  # times what is usual in the sample: the share of an error in a cell that is looked at
MOST_CELLS = 4  # with the largest shares, and as many with the largest errors


def spread_over_rows(weight: Weight) -> bool:
    """Whether groups of a scale are blocks that span rows, so that sampled rows hold only parts of them."""
    return weight.block_size is not None and weight.block_size[0] > 1


def cells_of(weight: Weight) -> Cells | None:
    """The parts of a weight that have scales of their own, as far as windows tell them apart; None where it has one."""
    if weight.levels is None or weight.encoding == "cast" or weight.rotated:
        return None
    cols = weight.matrix[1]
    if weight.block_size is None:
        return Cells(1, cols) if weight.scale is not None and weight.scale.n > 1 else None
    down, across = weight.block_size
    if weight.matrix_rows % down:
        return None
    return Cells(down, cols if across >= cols else across if across % WINDOW == 0 else WINDOW)


def largest_of_runs(weight: Weight, sums: Sums) -> Tensor | None:
    """The largest magnitude of the original in each run of groups, (runs,): of an expert with one scale, or of groups
    whose scales share a step; None where there are none, or it is not known.
    """
    cells, steps = cells_of(weight), weight.scale_steps
    if cells is None or not sums.peaks:
        return None
    size = 0
    if steps and steps.of_largest and weight.block_size and cells.rows == 1 and weight.matrix[1] % cells.cols == 0:
        size = steps.shared * weight.block_size[1] // cells.cols
    elif weight.block_size is None and cells.rows == 1:
        size = weight.matrix_rows
    most = joined(sums.peaks)[0].reshape(-1)
    return torch.nn.functional.pad(most, (0, -len(most) % size)).view(-1, size).amax(1) if size else None


def blocks_of(weight: Weight, rows: Sequence[int]) -> list[Chunk]:
    """Blocks of a scale that each of these rows goes through, some of them, of a weight of such blocks."""
    (down, across), cols = weight.block_size or (1, 1), weight.matrix[1]
    tops = sorted({row // down * down for row in rows if row // down * down + down <= weight.matrix[0]})
    lefts = range(0, cols - across + 1, across)[:MOST_CELLS]
    return [Chunk(top, top + down, left, left + across) for top in tops for left in lefts]


def conspicuous_rows(sums: Sums, sample: Attainable) -> list[int]:
    """Those of the worst rows that have far more error than their weight, or than its sample."""
    usual = min(ratio(as_float(sums.e_sq), as_float(sums.x_sq)), ratio(sample.e_sq, sample.x_sq))
    worst = worst_rows(sums.rows.items())
    return [number for number, row in worst if as_float(row.e_sq) >= ROW * usual * as_float(row.x_sq)]


def conspicuous_cells(weight: Weight, sums: Sums, sample: Sequence[Chunk]) -> list[Chunk]:
    """Those whose largest error is a larger share of their largest value than it is in the sample.

    Usual is the median of what is most in each chunk of it: one of them may be damaged.

    A quantizer's error is a share of the largest value of a group, and so is what a scale leaves that is too large or
    too small, or zero.
    """
    cells = cells_of(weight)
    if cells is None or not sums.peaks or not sample:
        return []
    peaks = joined(sums.peaks)
    usual = median(largest_share(peaks[:, down, across]) for down, across in (cells.of(chunk) for chunk in sample))
    if weight.levels and weight.levels.mantissa and spread_over_rows(weight):  # few are sampled
        usual = max(usual, 2.0 ** -(weight.levels.mantissa + 1))
    rows, cols = weight.matrix
    found = []
    for down, across in conspicuous(peaks, CELL * usual, MOST_CELLS):
        row, col = down * cells.rows, across * cells.cols
        if row + cells.rows <= rows:
            found.append(Chunk(row, row + cells.rows, col, min(col + cells.cols, cols)))
    return found
