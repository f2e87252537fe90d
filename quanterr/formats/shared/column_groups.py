"""Blocks of columns that share a scale and a zero point: which of them a column belongs to.

    block of column c = c // size; the last may be shorter
                      = g_idx[c], where that is stored: act-order, by the importance of columns

The size is not stored. In this order: what the configuration says, where it gives that many blocks; a power
of two; a divisor of the columns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats.shared.scale_grid import by_block
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.decoder import OfBlocks
from quanterr.tensors.workspace import Workspace

SIZES = tuple(1 << n for n in range(3, 15))


@dataclass(frozen=True, slots=True)
class Blocks:
    """``n`` blocks of ``size`` columns; ``order`` holds the block of each column, where they are mixed."""

    n: int
    size: int
    order: Entry | None = None
    warning: str | None = None

    @property
    def edges(self) -> tuple[int, int] | None:
        """(rows, cols) of a block, None where the whole row is one."""
        return (1, self.size) if self.n > 1 else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the size, in words."""
        return (self.warning,) if self.warning else ()

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 where the whole row does."""
        return self.size if self.n > 1 else 0

    def within(self, of_blocks: OfBlocks) -> OfBlocks:
        """``of_blocks``, which gives those of whole rows, (1 or r, n or more), as those of a chunk alone."""

        def cut(chunk: Chunk, workspace: Workspace) -> Tensor:
            return of_blocks(chunk, workspace)[:, chunk.col // self.size : -(-chunk.stop_col // self.size)]

        return cut

    def dequantize(
        self, codes: Tensor, zero_point: Tensor | float, scale: Tensor, chunk: Chunk, workspace: Workspace
    ) -> Tensor:
        """(code - zero point) · scale in place, each rounded.

        ``codes`` are those of a chunk, (r, c); ``zero_point`` and ``scale`` are (1 or r, n); all float32.
        """
        if isinstance(zero_point, Tensor):
            self.change(Tensor.sub_, codes, zero_point, chunk, workspace)
        elif zero_point:
            codes.sub_(zero_point)
        return self.change(Tensor.mul_, codes, scale, chunk, workspace)

    def change(
        self,
        operation: Callable[[Tensor, Tensor], Tensor],
        values: Tensor,
        of_block: Tensor,
        chunk: Chunk,
        workspace: Workspace,
    ) -> Tensor:
        """``operation(values, of_block)`` in place: ``values`` of a chunk, (r, c), and of each block, (1 or r, n)."""
        if self.order is None:
            left, right = chunk.col // self.size, -(-chunk.stop_col // self.size)
            return by_block(operation, values, of_block[:, left:right], chunk.col, self.size)
        order = workspace.whole("order", self.order)[chunk.col : chunk.stop_col]
        of_column = workspace.buffer("of_column", (of_block.shape[0], len(order)), torch.float32)
        return operation(values, torch.index_select(of_block, 1, order, out=of_column))


def fit_blocks(n: int, cols: int, configured: int | None = None, order: Entry | None = None) -> Blocks:
    """The blocks of a weight's columns, given their number, and what the configuration says of their size.

    Raises:
        FormatMismatch: no size gives that many; the order names blocks that are not there.
    """
    if order is not None and (found := _fit_order(order, n, cols)):
        return found
    if n == 1:
        return Blocks(1, cols)
    if configured and -(-cols // configured) == n:
        return Blocks(n, configured)
    powers = [size for size in SIZES if -(-cols // size) == n]
    sizes = powers + [cols // n for _ in range(1) if n and cols % n == 0 and cols // n not in powers]
    if not sizes:
        raise FormatMismatch(f"{n} blocks of columns fit no size in {cols} columns")
    warning = (
        f"blocks of {sizes[0]} columns are inferred from shapes alone; {sizes[1]} would fit as well"
        if sizes[1:]
        else None
    )
    return Blocks(n, sizes[0], warning=warning)


def _fit_order(entry: Entry, n: int, cols: int) -> Blocks | None:
    """The blocks by a stored order; None where it is not used."""
    if entry.shape != (cols,) or not cols:
        raise FormatMismatch(f"{entry} should have one for each of {cols} columns")
    order = torch.frombuffer(bytearray(entry.read()), dtype=torch.int32)
    if bool((order == -1).all()):
        return None
    low, high = (int(bound) for bound in torch.aminmax(order))
    if low < 0 or high >= n:
        raise FormatMismatch(f"{entry} names block {low if low < 0 else high}, but there are {n}, from 0 on")
    size = int((order == 0).sum())
    plain = size and torch.equal(order, torch.arange(len(order), dtype=torch.int32) // size)
    return Blocks(n, size if plain else -(-cols // n), None if plain else entry)
