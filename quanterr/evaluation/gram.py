"""XᵀX of inputs that arrive in batches, and the output error ‖X Eᵀ‖² that follows from it."""

import torch
from torch import Tensor

from quanterr.tensors.products import multiply

EDGE = 192  # columns of a block: smaller products are slower
MOST = 1 << 24  # elements; larger products take too much memory


class Gram:
    """XᵀX without the blocks above the diagonal: it is symmetric, which halves products and memory."""

    def __init__(self, columns: int, device: torch.device) -> None:
        """Start at zero."""
        self._parts = [slice(first, min(first + EDGE, columns)) for first in range(0, columns, EDGE)]
        self._blocks = [
            torch.zeros(part.stop - part.start, part.stop, dtype=torch.float64, device=device) for part in self._parts
        ]  # up to the diagonal

    @staticmethod
    def is_cheaper(columns: int, inputs: int, outputs: int) -> bool:
        """Return whether XᵀX of ``inputs`` rows and :meth:`energy` of ``outputs`` rows cost less than X Eᵀ."""
        if columns**2 > MOST:
            return False
        blocks = min(columns + EDGE, 2 * columns) / 2  # mean number of columns up to the diagonal
        return (inputs + outputs) * blocks < inputs * outputs

    def add(self, x: Tensor) -> None:
        """Add inputs, (n, columns)."""
        columns = at_least_float32(x).t().contiguous()
        for part, block in zip(self._parts, self._blocks, strict=True):
            block += multiply(columns[part], columns[: part.stop])

    def energy(self, error: Tensor) -> float:
        """Return ‖X Eᵀ‖² of an error E, (outputs, columns), as Σ (E XᵀX) ∘ E."""
        error, total = at_least_float32(error), 0.0
        for part, block in zip(self._parts, self._blocks, strict=True):
            both = block.to(error.dtype, copy=True)
            both[:, : part.start] *= 2  # each block below the diagonal counts twice
            products = multiply(error[:, : part.stop], both)
            total += float(torch.linalg.vecdot(products, error[:, part]).sum(dtype=torch.float64))
        return total


def at_least_float32(values: Tensor) -> Tensor:
    """Return float64 values as they are, all others in float32."""
    return values if values.dtype == torch.float64 else values.float()
