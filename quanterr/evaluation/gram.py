"""XᵀX of inputs that come one after the other, and what it says of the outputs that an error of a weight changes."""

import torch
from torch import Tensor

EDGE = 384  # columns of a block: smaller products are slower
MOST = 1 << 24  # elements: larger ones take too much memory


class Gram:
    """XᵀX, of which blocks below the diagonal are left out, as it is symmetric: half of the products."""

    def __init__(self, columns: int, device: torch.device) -> None:
        """Of no inputs yet."""
        self._sums = torch.zeros(columns, columns, dtype=torch.float64, device=device)

    @staticmethod
    def is_cheaper(columns: int, inputs: int, outputs: int) -> bool:
        """Whether XᵀX of ``inputs`` rows and :meth:`energy` of an error of ``outputs`` rows take less than X Eᵀ."""
        if columns**2 > MOST:
            return False
        blocks = min(columns + EDGE, 2 * columns) / 2  # columns of a row on and above the diagonal, in the mean
        return (inputs + outputs) * blocks < inputs * outputs

    def add(self, x: Tensor) -> None:
        """Inputs, (n, columns)."""
        x = x.float()
        for first in range(0, x.shape[1], EDGE):
            self._sums[first : first + EDGE, first:] += x[:, first : first + EDGE].t() @ x[:, first:]

    def energy(self, error: Tensor) -> float:
        """‖X Eᵀ‖² of an error, (outputs, columns), as Σ (E XᵀX) ∘ E."""
        error, total = error.float(), 0.0
        for first in range(0, error.shape[1], EDGE):
            own, above = error[:, first : first + EDGE], self._sums[: first + EDGE, first : first + EDGE].float()
            products = own @ above[first:]
            products.addmm_(error[:, :first], above[:first], alpha=2)
            total += float(products.mul_(own).sum(dtype=torch.float64))
        return total
