"""XᵀX of inputs that arrive in batches, and the output error ‖X Eᵀ‖² that follows from it."""

import torch
from torch import Tensor

from quanterr.tensors.products import multiply, uses_onednn

EDGE = 192  # columns of a block: smaller products are slower
MOST = 1 << 24  # elements; larger products take too much memory
MOST_WAITING = 1 << 21  # elements of inputs that are kept to be multiplied together, which is faster


class Gram:
    """XᵀX without the blocks above the diagonal: as it is symmetric, half of the products and memory suffice."""

    def __init__(self, columns: int, device: torch.device) -> None:
        """Start at zero."""
        self._parts = [slice(first, min(first + EDGE, columns)) for first in range(0, columns, EDGE)]
        self._blocks = [
            torch.zeros(part.stop - part.start, part.stop, dtype=torch.float64, device=device) for part in self._parts
        ]  # up to the diagonal
        self._waiting: list[Tensor] = []  # inputs that are not multiplied yet
        self._most_waiting = min(columns**2, MOST_WAITING)  # no more memory than XᵀX itself

    @staticmethod
    def is_cheaper(columns: int, inputs: int, outputs: int) -> bool:
        """Return whether XᵀX of ``inputs`` rows and :meth:`energy` of ``outputs`` rows cost less than X Eᵀ."""
        if columns**2 > MOST:
            return False
        blocks = min(columns + EDGE, 2 * columns) / 2  # mean number of columns up to the diagonal
        return (inputs + outputs) * blocks < inputs * outputs

    def add(self, x: Tensor) -> None:
        """Add inputs, (n, columns), which must not change any more."""
        self._waiting.append(x)
        if sum(each.numel() for each in self._waiting) >= self._most_waiting:
            self._multiply()

    def _multiply(self) -> None:
        """Add XᵀX of the inputs that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        columns = at_least_float32(torch.cat(waiting) if len(waiting) > 1 else waiting[0]).t()
        if uses_onednn(columns):
            columns = columns.contiguous()
        with torch.inference_mode():  # the blocks were made in this mode
            for part, block in zip(self._parts, self._blocks, strict=True):
                block += multiply(columns[part], columns[: part.stop])

    def energy(self, error: Tensor) -> float:
        """Return ‖X Eᵀ‖² of an error E, (outputs, columns), as Σ (E XᵀX) ∘ E."""
        self._multiply()
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
