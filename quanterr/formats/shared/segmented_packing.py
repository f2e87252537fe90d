"""Codes packed together with distant codes: each element holds one code from every part of the matrix.

    stored    P elements of u8 or i32, whatever dtype they are stored as, each with v codes
    code e    of the matrix, row by row: in element e % P, at the bits of part e // P

So a run of codes is read from one run of elements for each part that it touches. If v does not divide the rows,
the matrix is padded with rows of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Order, Workspace
from quanterr.formats.shared.element_types import list_integers
from quanterr.kernel.decoder import BlockNumbers, SharedBytes
from quanterr.kernel.grid import Grid
from quanterr.lazy_torch import Tensor, torch

# HQQ's names → bytes of an element, bits of a code, bit position of each part of the rows
PACKINGS = {
    "8bit_u8": (1, 8, (0,)),
    "4bit_u8": (1, 4, (4, 0)),
    "3bit_32": (4, 3, tuple(range(27, -1, -3))),
    "2bit_u8": (1, 2, (6, 4, 2, 0)),
    "1bit_u8": (1, 1, tuple(range(7, -1, -1))),
}


@dataclass(frozen=True, slots=True)
class Planes:
    """Codes of ``bits`` bits in elements of ``itemsize`` bytes; codes of part p start at bit ``shifts[p]``."""

    entry: Entry
    itemsize: int
    bits: int
    shifts: tuple[int, ...]

    @property
    def elements(self) -> int:
        """P, the number of elements."""
        return self.entry.nbytes // self.itemsize

    @property
    def codes(self) -> int:
        """The number of codes, padding included."""
        return self.elements * len(self.shifts)

    def decode(
        self,
        matrix: tuple[int, int],
        group: int,
        scale: BlockNumbers,
        zero: BlockNumbers | None = None,
        shift: BlockNumbers | None = None,
        levels: tuple[float, ...] = (),
        factor: Grid | None = None,
    ) -> Decoder:
        """Return the decoder of the weight; see :class:`Decoder`. Levels are those of integers by default.

        The kernel reads codes of which whole rows share bytes.
        """
        rows, cols = matrix
        are_rows = self.itemsize == 1 and not self.elements % cols and self.codes == rows * cols and group > 0
        return Decoder(
            self.entry,
            cols,
            levels=levels or list_integers(self.bits),
            scale=scale,
            zero=zero,
            shift=shift,
            group=group,
            order=Order.SHARED_BYTES if are_rows else Order.ROWS,
            shared=SharedBytes(self.elements // cols, self.shifts, self.bits) if are_rows else None,
            factor=factor,
            read=None if are_rows else partial(self.read_chunk, cols),
        )

    def read_chunk(self, cols: int, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Read the codes of whole rows, or of a part of a row, of a matrix of ``cols`` columns: (r, c) integers."""
        begin, size = chunk.row * cols + chunk.col, self.itemsize
        stop, pieces = begin + chunk.n, list[Tensor]()
        while begin < stop:
            part, place = divmod(begin, self.elements)
            n = min(self.elements - place, stop - begin)
            stored = workspace.read_bytes("codes", self.entry, place * size, (n * size,))
            elements = stored.view(torch.uint8 if size == 1 else torch.int32)
            pieces.append(elements >> self.shifts[part] & (1 << self.bits) - 1)
            begin += n
        return torch.cat(pieces).view(chunk.shape)
