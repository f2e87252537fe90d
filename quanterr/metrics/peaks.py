"""The largest |x| and |e| of each cell of a weight: which of them have errors that others of their size do not have.

Cells are groups of a scale where these are whole windows of columns, and windows where groups are smaller.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

WINDOW = 64  # columns


class Cells(NamedTuple):
    """How a weight is divided: rows and columns of a cell, of which only the last may be smaller."""

    rows: int
    cols: int  # whole windows, or all columns

    def of(self, chunk: tuple[int, int, int, int]) -> tuple[slice, slice]:
        """Rows and columns of the cells that a chunk, from row to row and column to column, has a part in."""
        row, stop_row, col, stop_col = chunk
        return slice(row // self.rows, -(-stop_row // self.rows)), slice(col // self.cols, -(-stop_col // self.cols))

    def piece(self, peaks: Tensor, row: int) -> "Peaks":
        """Of all columns of some rows, from the largest of windows, (2, r, windows) or, of cells as wide, (2, r, 1)."""
        across = min(-(-self.cols // WINDOW), peaks.shape[2])
        above = row % self.rows
        below, right = -(above + peaks.shape[1]) % self.rows, -peaks.shape[2] % across
        if above or below or right:
            peaks = pad(peaks, (0, right, above, below))
        found = peaks.reshape(2, peaks.shape[1] // self.rows, self.rows, -1, across).amax((2, 4))
        return Peaks(row // self.rows, found.cpu())


class Peaks(NamedTuple):
    """The largest |x| and |e| of some rows of cells, (2, down, across) float32, from a row of cells on."""

    first: int
    values: Tensor


def joined(pieces: Sequence[Peaks]) -> Tensor:
    """The largest |x| and |e| of all cells, (2, down, across) float32."""
    if len(pieces) == 1:
        return pieces[0].values
    down = max(first + values.shape[1] for first, values in pieces)
    most = torch.zeros(2, down, pieces[0].values.shape[2])
    for first, values in pieces:
        own = most[:, first : first + values.shape[1]]
        torch.maximum(own, values, out=own)
    return most


def largest_share(peaks: Tensor) -> float:
    """The largest |e| as a share of the largest |x|, of any of some cells."""
    x, e = peaks
    return float((e / x).where(x > 0, 0.0).amax())


def conspicuous(peaks: Tensor, usual: float, most: int) -> list[tuple[int, int]]:
    """Cells, (row, column) of cells, whose largest |e| is a ``usual`` share of their largest |x| or more.

    ``most`` of those with the largest share, and as many of those with the largest |e|.
    """
    x, e = peaks
    out = e > usual * x
    out &= x > 0
    places = out.nonzero()
    if not len(places):
        return []
    errors = e[out]
    chosen = [numbers.topk(min(most, len(places))).indices for numbers in (errors / x[out], errors)]
    return sorted({(down, across) for down, across in places[torch.cat(chosen)].tolist()})
