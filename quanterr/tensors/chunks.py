"""Division of weights into chunks. It depends on the shape alone, so the same weight is always cut the same way.

A weight is handled as a matrix whose rows are the output rows of a linear layer:

    0-D, 1-D          one row
    2-D               (rows, cols)
    3-D stacked       (experts · rows, cols)
    convolutions      (output channels, everything else)
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, overload

# Elements of a chunk. On the CPU the chunk's buffers should fit the cache of one core and yet amortize the fixed cost
# of some forty operations; on a GPU a chunk should hide the launches.
CPU_CHUNK = 1 << 19
DEVICE_CHUNK = 1 << 23
MIN_DEVICE_CHUNK = 1 << 21  # minimum where the device's memory is short: 8 MiB of float32

KERNEL_WIDTH = 32  # a 3-D weight whose last axis is shorter is a 1-D convolution, not stacked experts


class Chunk(NamedTuple):
    """Rows ``row:stop_row`` and columns ``col:stop_col``.

    A chunk that is read in one go consists of whole rows or of a part of one row; a chunk of a block may have any
    columns.
    """

    row: int
    stop_row: int
    col: int
    stop_col: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape, (r, c)."""
        return self.stop_row - self.row, self.stop_col - self.col

    @property
    def n(self) -> int:
        """The number of elements."""
        return (self.stop_row - self.row) * (self.stop_col - self.col)


def split_chunks(chunks: Iterable[Chunk], size: int) -> list[Chunk]:
    """Split chunks into chunks of at most ``size`` elements."""
    return [
        Chunk(row + piece.row, row + piece.stop_row, col + piece.col, col + piece.stop_col)
        for row, stop_row, col, stop_col in chunks
        for piece in Cut(stop_row - row, stop_col - col, size)
    ]


@lru_cache(maxsize=1 << 10)  # many weights have the same shape
def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, cols) of the matrix as which a weight of this shape is handled."""
    if len(shape) < 2:
        return 1, prod(shape)
    if len(shape) == 3 and shape[2] >= KERNEL_WIDTH:
        return shape[0] * shape[1], shape[2]
    return shape[0], prod(shape[1:])


class Cut(Sequence[Chunk]):
    """The chunks of at most ``size`` elements that cover a matrix, in order."""

    def __init__(self, rows: int, cols: int, size: int) -> None:
        """Cut a matrix of ``rows`` × ``cols`` elements."""
        self._rows, self._cols = rows, cols
        max_rows = max(size // cols, 1) if cols else 1
        self._row_step = -(-rows // -(-rows // max_rows)) if rows else 1  # steps of nearly equal height
        self._col_step = min(cols, size)
        self._across = -(-cols // size)

    def __len__(self) -> int:
        return -(-self._rows // self._row_step) * self._across

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> "list[Chunk]": ...
    def __getitem__(self, index: int | slice) -> "Chunk | list[Chunk]":
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        down, across = divmod(index, self._across)
        row, col = down * self._row_step, across * self._col_step
        return Chunk(row, min(row + self._row_step, self._rows), col, min(col + self._col_step, self._cols))
