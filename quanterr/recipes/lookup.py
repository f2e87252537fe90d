"""Fast search for the nearest numbers of a small table: a cell of a fine grid, then one comparison with a bound."""

from collections.abc import Sequence
from math import inf, nextafter

from quanterr.lazy_torch import Tensor, torch

CELLS = 2048  # cells of the grid on each side of zero
MARGIN = 0.01  # allowance for the rounding error of a cell's index, in cells


class Lookup:
    """A function that returns the codes of the nearest numbers in a table."""

    def __init__(self, values: Sequence[float], codes: Sequence[int], bounds: Sequence[float]) -> None:
        """Take ascending ``values`` with their ``codes``; value i is the nearest one up to ``bounds[i]``."""
        self._highest = max(abs(values[0]), abs(values[-1]))
        edges = (torch.arange(2 * CELLS + 1, dtype=torch.float64) - CELLS - MARGIN) * (self._highest / CELLS)
        lower = torch.bucketize(edges, torch.tensor(bounds, dtype=torch.float64))
        code_of = torch.tensor(codes, dtype=torch.uint8)
        self._bound = torch.tensor([*bounds, inf])[lower]  # the only bound that a cell can contain
        self._below = code_of[lower]
        self._change = self._below ^ code_of[(lower + 1).clamp_(max=len(codes) - 1)]  # bits that change at the bound

    def __call__(self, x: Tensor) -> Tensor:
        """Return the codes of float32 numbers, uint8 in the same shape, clamped to the table; overwrites ``x``."""
        flat = x.view(-1).clamp_(-self._highest, self._highest)
        cells = (flat * (CELLS / self._highest)).add_(CELLS).int()
        above = self._bound.index_select(0, cells).sub_(flat).view(torch.int32) >> 31  # -1 if x is above the bound
        change = self._change.index_select(0, cells).bitwise_and_(above.to(torch.uint8))
        return self._below.index_select(0, cells).bitwise_xor_(change).view(x.shape)


def next_below(bound: float) -> float:
    """Return the float32 number before ``bound``, so that a tie goes to the higher neighbour."""
    return float(torch.nextafter(torch.tensor(bound), torch.tensor(-inf))) if bound else nextafter(bound, -inf)
