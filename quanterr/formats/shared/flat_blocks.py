"""Blocks that run over a weight's elements in order, across the ends of its rows."""

from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace


class BlockRun(NamedTuple):
    """Blocks ``first:stop`` of ``size`` elements each, which cover a chunk of a weight of ``n`` elements."""

    size: int
    first: int
    stop: int
    n: int

    @classmethod
    def cover(cls, chunk: Chunk, shape: tuple[int, int], size: int) -> "BlockRun":
        """Return the blocks that cover a chunk of a matrix of that shape."""
        begin = chunk.row * shape[1] + chunk.col
        return cls(size, begin // size, -(-(begin + chunk.n) // size), shape[0] * shape[1])

    @property
    def begin(self) -> int:
        """The index of the first element in the blocks."""
        return self.first * self.size

    @property
    def end(self) -> int:
        """The index after the last element in the blocks, as the last block may be short."""
        return min(self.stop * self.size, self.n)

    def multiply(self, values: Tensor, scale: Tensor) -> None:
        """Multiply the blocks' values, (n,), by a scale per block, (blocks,), in place."""
        whole = len(values) // self.size
        values[: whole * self.size].view(whole, self.size).mul_(scale[:whole].unsqueeze(1))
        values[whole * self.size :].mul_(scale[whole:])

    def cut(self, values: Tensor, chunk: Chunk, cols: int) -> Tensor:
        """Cut the chunk, (r, c), of a matrix with ``cols`` columns out of the blocks' values, (n,)."""
        skipped = chunk.row * cols + chunk.col - self.begin
        return values[skipped : skipped + chunk.n].view(chunk.shape)


def read_of_rows(key: str, entry: Entry, across: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the numbers of the ``across`` blocks in each row of a chunk, (r, across) float32."""
    return workspace.read(key, entry, chunk.row * across, (chunk.shape[0], across)).float()
