"""Codes that no decoder describes, such as vectors: their stored tensors are read here, and given to a function."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.formats.base import Values
from quanterr.lazy_torch import Tensor
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

Stored = Mapping[str, Tensor]  # by role


class Custom(Struct, frozen=True, gc=False):
    """A ``dequantize`` function that decodes whole rows, in tiles of ``height`` rows, of which a weight has ``tiles``.

    ``decode`` takes the stored tensors and a chunk of whole tiles, and returns its values, (r, cols or more) float32.
    Tensors are read whole, in their shape; those of ``by_tile``, whose first axis counts tiles or more, for the chunk
    alone.
    """

    entries: Mapping[str, Entry]
    decode: Callable[[Stored, Chunk], Tensor]
    height: int = 1
    tiles: int = 0
    by_tile: frozenset[str] = frozenset()

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Values:
        """Return the values of a chunk."""
        top, bottom = chunk.row // self.height, -(-chunk.stop_row // self.height)
        stored = {}
        for role, entry in self.entries.items():
            if role in self.by_tile:
                shape = (bottom - top) * (entry.shape[0] // self.tiles), *entry.shape[1:]
                stored[role] = workspace.read(role, entry, top * entry.n // self.tiles, shape)
            else:
                stored[role] = workspace.read_whole(role, entry)
        values = self.decode(stored, chunk._replace(row=top * self.height, stop_row=bottom * self.height))
        rows = slice(chunk.row - top * self.height, chunk.stop_row - top * self.height)
        return Values(values[rows, chunk.col : chunk.stop_col].contiguous())
