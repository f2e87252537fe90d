"""Blocks of a weight that run over its elements in order, across the ends of its rows."""

from typing import NamedTuple

from torch import Tensor

from quanterr.tensors.chunks import Chunk


class Blocks(NamedTuple):
    """Blocks number ``first:stop`` of ``size`` elements each, which cover a chunk; the weight has ``n`` elements."""

    size: int
    first: int
    stop: int
    n: int

    @classmethod
    def of(cls, chunk: Chunk, shape: tuple[int, int], size: int) -> "Blocks":
        """Those of a chunk of a matrix of that shape."""
        begin = chunk.row * shape[1] + chunk.col
        return cls(size, begin // size, -(-(begin + chunk.n) // size), shape[0] * shape[1])

    @property
    def begin(self) -> int:
        """Number of their first element."""
        return self.first * self.size

    @property
    def end(self) -> int:
        """Number after their last element: the last block may be short."""
        return min(self.stop * self.size, self.n)

    def multiply(self, values: Tensor, scale: Tensor) -> None:
        """The blocks' values, (n,), times a scale of each block, (blocks,), in place."""
        whole = len(values) // self.size
        values[: whole * self.size].view(whole, self.size).mul_(scale[:whole].unsqueeze(1))
        values[whole * self.size :].mul_(scale[whole:])

    def cut(self, values: Tensor, chunk: Chunk, cols: int) -> Tensor:
        """The chunk, (r, c), of the values of the blocks, (n,), in a matrix of ``cols`` columns."""
        skipped = chunk.row * cols + chunk.col - self.begin
        return values[skipped : skipped + chunk.n].view(chunk.shape)
