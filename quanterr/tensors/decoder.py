"""How codes become values, as data: what the compiled kernel carries out itself, instead of calling a format."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.native import Element, Order
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

__all__ = ["BITS", "Decoder", "Element", "Native", "Order"]

OfBlocks = Callable[[Chunk, Workspace], Tensor]  # (1 or r, blocks of columns) float32

# By element: how many of them are stored together, and in how many bytes.
BITS: dict[Element, tuple[int, int]] = {
    Element.F32: (1, 4),
    Element.BF16: (1, 2),
    Element.F16: (1, 2),
    Element.I8: (1, 1),
    Element.E4M3: (1, 1),
    Element.Q8_0: (32, 34),
    Element.Q4_K: (256, 144),
    Element.Q6_K: (256, 210),
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """(value of the code - zero) · scale, or value · scale + shift, of codes in rows of ``cols`` elements.

    Each operation rounds to float32. ``table``, of Element.TABLE, is (256, elements per byte) float32. ``scale``,
    ``zero`` and ``shift`` give those of the blocks of ``group`` columns of a chunk; 0: of its whole rows. ``ends`` are
    the bytes of saturated codes, at most three.
    """

    codes: Entry
    cols: int
    element: Element
    table: Tensor | None = None
    scale: OfBlocks | None = None
    zero: OfBlocks | None = None
    shift: OfBlocks | None = None
    group: int = 0
    order: Order = Order.ROWS
    ends: tuple[int, ...] = ()

    @property
    def together(self) -> tuple[int, int]:
        """How many elements are stored together, and in how many bytes."""
        return BITS[self.element] if self.table is None else (int(self.table.shape[1]), 1)


@dataclass(frozen=True, slots=True)
class Native:
    """A format's ``dequantize`` and the same as data. Whoever wraps it loses the data, which no longer fit then."""

    dequantize: Callable[[Chunk, Workspace], Any]
    decoder: Decoder

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Any:
        """What ``dequantize`` gives."""
        return self.dequantize(chunk, workspace)


def decoder_of(dequantize: Callable[[Chunk, Workspace], Any]) -> Decoder | None:
    """The data of a dequantize function that has them."""
    return dequantize.decoder if isinstance(dequantize, Native) else None
