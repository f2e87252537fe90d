"""Blocks of columns that share a scale and a zero point, and the assignment of columns to blocks.

    block of column c = c // size; the last may be shorter
                      = g_idx[c], where that is stored: act-order, by the importance of columns

The size is not stored. It is the first of these that gives the stored number of blocks: the configured size, a power of
two, a divisor of the number of columns.
"""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.kernel.grid import Grid
from quanterr.kernel.packing import CodePacking
from quanterr.util.text import count

SIZES = tuple(1 << n for n in range(3, 15))


class ColumnBlocks(Struct, frozen=True, gc=False):
    """``n`` blocks of ``size`` columns; ``order`` holds each column's block where columns are permuted."""

    n: int
    size: int
    order: Entry | None = None
    warning: str | None = None
    named: int = 0  # blocks that the order names, if it is stored

    @property
    def edges(self) -> tuple[int, int] | None:
        """The (rows, cols) of a block; None if the whole row is one block."""
        return (1, self.size) if self.n > 1 else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Doubts about the size, in words."""
        return (self.warning,) if self.warning else ()

    @property
    def group(self) -> int:
        """The number of columns that share a scale; 0 if the whole row shares one."""
        return self.size if self.n > 1 else 0

    def grid(self, entry: Entry, key: str = "scale", turned: bool = False, width: int = 0) -> Grid:
        """Return the grid of the blocks' numbers; ``width`` of them are stored for each row, if they are padded."""
        return Grid(entry, width or self.n, 0 if self.order else self.size, turned=turned, key=key)

    def packed_grid(
        self, entry: Entry, packing: CodePacking, turned: bool = False, levels: tuple[float, ...] = ()
    ) -> Grid:
        """Return the zero points of the blocks, which are packed codes; ``levels`` are their values."""
        return replace(self.grid(entry, "zero_point", turned), packing=packing, levels=levels)


def fit_blocks(n: int, cols: int, configured: int | None = None, order: Entry | None = None) -> ColumnBlocks:
    """Return the blocks of a weight's columns, given their number and the configured size, if any.

    Raises:
        FormatMismatch: no size gives ``n`` blocks, or the order names blocks that do not exist.
    """
    if order is not None and (blocks := _fit_order(order, n, cols)):
        return blocks
    if n == 1:
        return ColumnBlocks(1, cols)
    if configured and -(-cols // configured) == n:
        return ColumnBlocks(n, configured)
    powers = [size for size in SIZES if -(-cols // size) == n]
    sizes = powers + [cols // n for _ in range(1) if n and cols % n == 0 and cols // n not in powers]
    if not sizes:
        raise FormatMismatch(f"{n} blocks of columns fit no block size in {cols} columns")
    warning = (
        f"blocks of {sizes[0]} columns are inferred from shapes alone; {sizes[1]} would fit as well"
        if sizes[1:]
        else None
    )
    return ColumnBlocks(n, sizes[0], warning=warning)


def _fit_order(entry: Entry, n: int, cols: int) -> ColumnBlocks | None:
    """Return the blocks that a stored order gives; None if the order is unused (all -1)."""
    if entry.shape != (cols,) or not cols:
        raise FormatMismatch(f"{entry} should have one number for each of {cols} columns")
    low, high, size, named = _examine_order(entry.read())
    if low == high == -1:
        return None
    if low < 0 or high >= n:
        raise FormatMismatch(f"{entry} names block {low if low < 0 else high}, but blocks are 0 to {n - 1}")
    in_order = size > 0 and -(-cols // size) == n
    lost = f"{entry.name} names {named} of {count(n, 'block')} of columns: the order of columns was lost"
    return ColumnBlocks(
        n, size if in_order else -(-cols // n), None if in_order else entry, lost if named < n else None, named
    )


def list_orders(stored: ColumnBlocks) -> list[tuple[ColumnBlocks, str]]:
    """Return the possible orders of columns, that of the file first, each in words.

    If the stored order leaves blocks out, it was not written as it should be: columns may be in order.
    """
    if stored.order is None or stored.named == stored.n:
        return [(stored, "")]
    name = stored.order.name.rpartition(".")[2]
    return [
        (stored, f"; columns in the order of {name}, which names {stored.named} of {count(stored.n, 'block')}"),
        (replace(stored, order=None), "; columns in order"),
    ]


@lru_cache(maxsize=8)  # weights of a model have the same order, unless it is by importance
def _examine_order(stored: bytes) -> tuple[int, int, int, int]:
    """Return the minimum and maximum block of a stored order, the size of blocks, and the number of blocks named.

    The size is 0 if columns are permuted.
    """
    order = memoryview(stored).cast("i").tolist()
    size = order.count(0)
    is_plain = size > 0 and all(block == column // size for column, block in enumerate(order))
    return min(order), max(order), size if is_plain else 0, len(set(order))
