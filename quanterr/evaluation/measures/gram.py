"""XᵀX of inputs that arrive in batches, and the output error ‖X Eᵀ‖² that follows from it."""

import torch
from torch import Tensor

from quanterr.tensors.products import multiply, uses_onednn

BLOCK_COLUMNS = 192  # products of fewer columns are slower
MAX_ELEMENTS = 1 << 24  # products with more elements take too much memory
MAX_WAITING_ELEMENTS = 1 << 21  # inputs are kept up to this size and multiplied together, which is faster


class Gram:
    """XᵀX without the blocks above the diagonal, which the symmetric matrix does not need: half the time and memory."""

    def __init__(self, columns: int, device: torch.device) -> None:
        """Start at zero."""
        self._parts = [slice(first, min(first + BLOCK_COLUMNS, columns)) for first in range(0, columns, BLOCK_COLUMNS)]
        self._blocks = [
            torch.zeros(part.stop - part.start, part.stop, dtype=torch.float64, device=device) for part in self._parts
        ]  # up to the diagonal
        self._waiting: list[Tensor] = []  # inputs that have not been multiplied yet
        self._max_waiting = min(columns**2, MAX_WAITING_ELEMENTS)  # no more memory than XᵀX takes

    @staticmethod
    def is_cheaper(columns: int, inputs: int, outputs: int) -> bool:
        """Return whether XᵀX of ``inputs`` rows and :meth:`energy` of ``outputs`` rows cost less than X Eᵀ."""
        if columns**2 > MAX_ELEMENTS:
            return False
        blocks = min(columns + BLOCK_COLUMNS, 2 * columns) / 2  # mean number of columns up to the diagonal
        return (inputs + outputs) * blocks < inputs * outputs

    def add(self, x: Tensor) -> None:
        """Add inputs, (n, columns), which must not change any more."""
        self._waiting.append(x)
        if sum(each.numel() for each in self._waiting) >= self._max_waiting:
            self._multiply()

    def _multiply(self) -> None:
        """Add XᵀX of the waiting inputs."""
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
    """Return float64 values unchanged, and all others in float32."""
    return values if values.dtype == torch.float64 else values.float()
