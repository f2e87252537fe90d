"""Decoding rules as data: interpreter.py specifies their values, and the compiled kernel carries out most of them."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.kernel.enums import ElementType, Order
from quanterr.kernel.structs import BlocksStruct
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

__all__ = ["BITS", "Decoder", "ElementType", "Order"]

MOST_ROTATED = 512  # most columns that the compiled kernel rotates together
FLOATS = {"F32": ElementType.F32, "BF16": ElementType.BF16, "F16": ElementType.F16}
OfBlocks = Callable[[Chunk, Workspace], Tensor]  # (1 or r, blocks of columns) float32

# Element type → how many elements are stored together, and in how many bytes.
BITS: dict[ElementType, tuple[int, int]] = {
    ElementType.F32: (1, 4),
    ElementType.BF16: (1, 2),
    ElementType.F16: (1, 2),
    ElementType.I8: (1, 1),
    ElementType.E4M3: (1, 1),
} | {ElementType[name]: BLOCKS[name] for name in ElementType.__members__ if name in BLOCKS}


def read_constant(number: float, _chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return a number that all blocks share, (1, 1) float32."""
    return torch.full((1, 1), number, dtype=torch.float32, device=workspace.device)


class NestedScales(NamedTuple):
    """The scales of scales: each ``n`` scales of a weight are multiplied by a factor; then ``offset`` is added.

    Both operations round to float32. ``factors`` is F32.
    """

    factors: Entry
    n: int
    offset: float


class StoredScales(NamedTuple):
    """A weight's scales, of a dtype in :data:`FLOATS`: ``height`` rows of the weight share a row of ``width``.

    They are stored by rows, or if ``turned``, by columns. If they are bytes, ``table`` returns what each stands for,
    (256,) float32, which may be ``nested``.
    """

    entry: Entry
    height: int
    width: int
    turned: bool = False
    table: Callable[[Workspace], Tensor] | None = None
    nested: NestedScales | None = None

    @classmethod
    def fit(cls, entry: Entry, rows: int, width: int, height: int = 1, turned: bool = False) -> "StoredScales | None":
        """Return scales in ``rows`` rows; None if there are more or fewer, or they must be converted."""
        return cls(entry, height, width, turned) if entry.dtype in FLOATS and entry.n == rows * width else None


class SharedBytes(NamedTuple):
    """The codes of several rows in each byte: of rows r, r + ``step``, r + 2 · ``step`` … of the weight.

    Codes have ``bits`` bits; ``shifts`` has the lowest bit of each row's codes.
    """

    step: int
    shifts: tuple[int, ...]
    bits: int


class Decoder(Struct, gc=False):
    """A decoding rule, (value of the code - zero) · scale or value · scale + shift, for rows of ``cols`` elements.

    Each operation rounds to float32. If ``factor`` is not 0, the result is multiplied by it. ``table``, for
    ElementType.TABLE, is (256, elements per byte) float32; for ggml's IQ1 to IQ3, the levels of each index,
    (entries, levels) int8. ``scale``, ``zero`` and ``shift`` return one value per block of ``group`` columns of a
    chunk; if ``group`` is 0, one per whole row. ``ends`` are the bytes of saturated codes, at most three. If
    ``rotation``, a power of two up to MOST_ROTATED, is not 0, columns are finally rotated in groups of that size,
    as formats/shared/convrot.py specifies. ``stored``, if known, describes the file's tensor of scales, so that the
    kernel reads them itself instead of calling ``scale``. ``shared`` describes rows in Order.SHARED_BYTES.
    ``columns``, (cols,) int32, is the block of each column where columns of a block are not next to each other; it
    requires ``stored``. ``blocks``, for ElementType.BLOCKS, describes blocks that hold their own scales. Codes that the
    compiled kernel cannot read have no element type, but a function ``read``, which returns the levels of a chunk of
    whole groups, (r, c) float32 (or float64).
    """

    codes: Entry
    cols: int
    element: ElementType | None = None
    table: Tensor | None = None
    scale: OfBlocks | None = None
    zero: OfBlocks | None = None
    shift: OfBlocks | None = None
    group: int = 0
    order: Order = Order.ROWS
    ends: tuple[int, ...] = ()
    rotation: int = 0
    stored: StoredScales | None = None
    shared: SharedBytes | None = None
    factor: float = 0.0
    columns: Entry | None = None
    blocks: BlocksStruct | None = None
    read: Callable[[Chunk, Workspace], Tensor] | None = None

    @property
    def storage_unit(self) -> tuple[int, int]:
        """The (elements, bytes) of the smallest unit of storage."""
        if self.blocks is not None:
            return self.blocks.elements, self.blocks.n_bytes
        if self.element == ElementType.TABLE and self.table is not None:
            return int(self.table.shape[1]), 1
        return (1, 1) if self.element is None else BITS[self.element]
