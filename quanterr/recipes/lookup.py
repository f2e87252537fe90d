"""The nearest numbers of a small table, fast: by the compiled kernel, which compares with every bound.

Where there is none: a first guess from a fine grid, corrected by one comparison.
"""

from collections.abc import Sequence
from math import inf, nextafter

import torch
from torch import Tensor

from quanterr.native import Kernel, chosen

CELLS = 2048  # on each side of zero
MARGIN = 0.01  # of a cell: roundings in its number


class Lookup:
    """Codes of the nearest number in a table."""

    def __init__(self, values: Sequence[float], codes: Sequence[int], bounds: Sequence[float]) -> None:
        """``values`` ascend; ``codes`` are theirs; up to ``bounds[i]`` value i is the nearest."""
        self._most = max(abs(values[0]), abs(values[-1]))
        edges = (torch.arange(2 * CELLS + 1, dtype=torch.float64) - CELLS - MARGIN) * (self._most / CELLS)
        lower = torch.bucketize(edges, torch.tensor(bounds, dtype=torch.float64))
        own = torch.tensor(codes, dtype=torch.uint8)
        self._bound = torch.tensor([*bounds, inf])[lower]  # the one bound that may be in a cell
        self._below = own[lower]
        self._bounds, self._first = torch.tensor(bounds), codes[0]
        self._changes = (own[:-1] ^ own[1:]).int()  # at each bound
        self._change = self._below ^ own[(lower + 1).clamp_(max=len(codes) - 1)]  # to the code above it

    def __call__(self, x: Tensor) -> Tensor:
        """Codes of float32 numbers, uint8 in the same shape; ``x`` is overwritten. Beyond the table: its ends."""
        kernel = chosen().kernel
        return self._in_torch(x) if kernel is None else self._by_kernel(x.contiguous(), kernel)

    def _by_kernel(self, x: Tensor, kernel: Kernel) -> Tensor:
        found, table = torch.empty_like(x, dtype=torch.uint8), (self._bounds.data_ptr(), self._changes.data_ptr())
        kernel.nearest(x.data_ptr(), x.numel(), *table, len(self._bounds), self._first, found.data_ptr())
        return found

    def _in_torch(self, x: Tensor) -> Tensor:
        flat = x.view(-1).clamp_(-self._most, self._most)
        cells = (flat * (CELLS / self._most)).add_(CELLS).int()
        above = self._bound.index_select(0, cells).sub_(flat).view(torch.int32) >> 31  # its sign: -1 where x is above
        change = self._change.index_select(0, cells).bitwise_and_(above.to(torch.uint8))
        return self._below.index_select(0, cells).bitwise_xor_(change).view(x.shape)


def below(bound: float) -> float:
    """The float32 number before ``bound``: so that a tie goes to the higher neighbour."""
    return float(torch.nextafter(torch.tensor(bound), torch.tensor(-inf))) if bound else nextafter(bound, -inf)
