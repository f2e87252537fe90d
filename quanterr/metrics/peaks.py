"""The largest |x| and |e| of each cell of a weight, which show cells whose errors are unusually large for their values.

A cell is a scale group if groups span whole windows of columns; otherwise, it is as wide as a window.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch

WINDOW = 64  # columns of a window


class CellGrid(NamedTuple):
    """The numbers of rows and columns of a weight's cells; the last cells may be smaller."""

    rows: int
    cols: int  # a multiple of WINDOW, or all columns

    def of(self, chunk: tuple[int, int, int, int]) -> tuple[slice, slice]:
        """Return the ranges of rows and columns of cells that a chunk overlaps."""
        row, stop_row, col, stop_col = chunk
        return slice(row // self.rows, -(-stop_row // self.rows)), slice(col // self.cols, -(-stop_col // self.cols))

    def reduce(self, peaks: Tensor, row: int) -> "Peaks":
        """Reduce peaks of whole rows from ``row`` on to cells.

        ``peaks`` is (2, r, windows), or (2, r, 1) if a cell is as wide as the weight.
        """
        across = min(-(-self.cols // WINDOW), peaks.shape[2])
        above = row % self.rows
        below, right = -(above + peaks.shape[1]) % self.rows, -peaks.shape[2] % across
        if above or below or right:
            peaks = torch.nn.functional.pad(peaks, (0, right, above, below))
        # Reducing one axis after the other is twenty times faster than both at once.
        of_rows = peaks.reshape(2, peaks.shape[1] // self.rows, self.rows, -1).amax(2)
        cells = of_rows.reshape(*of_rows.shape[:2], -1, across).amax(3)
        return Peaks(row // self.rows, cells.cpu())


class Peaks(NamedTuple):
    """The largest |x| and |e| in rows of cells from number ``first`` on, (2, down, across) float32."""

    first: int
    values: Tensor


def join_peaks(pieces: Sequence[Peaks]) -> Tensor:
    """Merge pieces into the largest |x| and |e| of all cells, (2, down, across) float32."""
    if len(pieces) == 1:
        return pieces[0].values
    down = max(first + values.shape[1] for first, values in pieces)
    largest = torch.zeros(2, down, pieces[0].values.shape[2])
    for first, values in pieces:
        part = largest[:, first : first + values.shape[1]]
        torch.maximum(part, values, out=part)
    return largest


def compute_shares(peaks: Tensor) -> Tensor:
    """Return max |e| / max |x| of each cell, (down, across); 0 where x is zero."""
    x, e = peaks
    return torch.where(x > 0, e / x, 0.0)


def select_conspicuous(peaks: Tensor, shares: Tensor, usual: float, limit: int) -> list[tuple[int, int]]:
    """Find cells whose share exceeds ``usual``; return their (row, column) in the grid.

    Up to ``limit`` cells with the largest share and ``limit`` cells with the largest |e| are returned.
    """
    if float(shares.amax()) <= usual:
        return []
    places = (shares > usual).nonzero()
    down, across = places.unbind(1)
    chosen = [side[down, across].topk(min(limit, len(places))).indices for side in (shares, peaks[1])]
    return sorted({(row, col) for row, col in places[torch.cat(chosen)].tolist()})
