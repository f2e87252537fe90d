"""Decoding rules as data; interpreter.py specifies their values, and the compiled kernel executes most of them."""

from array import array
from collections.abc import Callable
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.kernel.enums import ElementType, Order
from quanterr.kernel.grid import Grid
from quanterr.kernel.rotation import rotate
from quanterr.kernel.structs import BlocksStruct
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

__all__ = ["BITS", "Decoder", "ElementType", "Order"]

WORD_BITS = 32
MAX_ROTATED_COLUMNS = 512  # maximum group size of a rotation in the compiled kernel
FLOATS = {"F32": ElementType.F32, "BF16": ElementType.BF16, "F16": ElementType.F16}
BlockNumbers = Callable[[Chunk, Workspace], Tensor]  # (1 or r, blocks of columns) float32

# Element type → how many elements are stored together, and in how many bytes.
BITS: dict[ElementType, tuple[int, int]] = {
    ElementType.F32: (1, 4),
    ElementType.BF16: (1, 2),
    ElementType.F16: (1, 2),
    ElementType.I8: (1, 1),
    ElementType.E4M3: (1, 1),
} | {ElementType[name]: BLOCKS[name] for name in ElementType.__members__ if name in BLOCKS}


class NestedScales(NamedTuple):
    """Scales that are stored as codes: each ``n`` of them are multiplied by a factor, then ``offset`` is added.

    Both operations round to float32. ``factors`` is F32.
    """

    factors: Entry
    n: int
    offset: float


class StoredScales(NamedTuple):
    """A weight's scales, of a dtype in :data:`FLOATS`: ``height`` rows of the weight share a row of ``width``.

    They are stored by rows, or if ``turned``, by columns. If they are bytes, ``table`` returns the value of each byte,
    (256,) float32, to which ``nested`` may be applied.
    """

    entry: Entry
    height: int
    width: int
    turned: bool = False
    table: Callable[[Workspace], Tensor] | None = None
    nested: NestedScales | None = None

    @classmethod
    def of(cls, grid: Grid) -> "StoredScales | None":
        """Return the scales of a grid; None if they need a conversion, or if a stack stores them matrix by matrix."""
        is_row_by_row = not grid.turned and grid.height == 1 and grid.down == grid.stack_rows
        if grid.tiles or grid.packing or (grid.stack_rows and not is_row_by_row):
            return None
        if grid.entry.n == grid.height == 1:  # a single number for all rows
            return None
        if grid.entry.dtype in FLOATS:
            return None if grid.steps else cls(grid.entry, grid.height, grid.width, grid.turned)
        if not grid.levels or not is_row_by_row or any(isinstance(n, Grid) and n.entry.n > 1 for _, n in grid.steps):
            return None
        return cls(grid.entry, 1, grid.width, table=grid.make_table)


class SharedBytes(NamedTuple):
    """Bytes that each hold the codes of several rows of the weight: r, r + ``step``, r + 2 · ``step`` …

    Codes have ``bits`` bits; ``shifts`` has the lowest bit of each row's codes.
    """

    step: int
    shifts: tuple[int, ...]
    bits: int


class LowRank(Struct, frozen=True, gc=False):
    """A low-rank product that is added to a weight; runtimes do not round its inputs (SVDQuant, SDNQ).

        weight = values / smooth + up @ down        if down is already divided by smooth
        weight = (values + up @ down) / smooth      if ``smoothed``

    ``up`` has a row for each row of the weight. ``down`` and ``smooth`` have a row for each column.
    The sum is computed in float64 and rounded to float32 once.

    Reference: mit-han-lab/nunchaku (SVDQuant, arXiv 2411.05007); Comfy-Org/comfy-kitchen@7d86acf
    tensor/svdquant_w4a4.py, whose weight is the output of its kernel for an identity matrix.
    """

    up: Grid
    down: Grid
    smooth: Grid | None = None
    smoothed: bool = False

    def add_to(self, values: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the weight's values in a chunk, (r, c) float32, given the values of its codes."""
        of_columns = Chunk(chunk.col, chunk.stop_col, 0, self.down.width)
        wide = values.double()
        smooth = None if self.smooth is None else self.smooth(of_columns, workspace).t().double()
        if smooth is not None and not self.smoothed:
            wide = wide / smooth
        up, down = self.up(chunk, workspace).double(), self.down(of_columns, workspace).t().double()
        wide = torch.addmm(wide, up, down)
        return (wide / smooth if smooth is not None and self.smoothed else wide).float()

    def read_factors(self, matrix: tuple[int, int], rotation: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Return the factors of a weight of (rows, cols), (rows, rank) and (rank, cols) float32, for unrotated inputs.

        ``rotation`` is that of the decoder.
        """
        rows, cols = matrix
        up = self.up(Chunk(0, rows, 0, self.up.width), workspace)
        of_columns = Chunk(0, cols, 0, self.down.width)
        down = self.down(of_columns, workspace).t()
        if self.smooth is not None and self.smoothed:
            down = down / self.smooth(of_columns, workspace).t()
        return up.clone(), rotate(down.contiguous().clone(), rotation) if rotation else down.clone()


class Decoder(Struct, gc=False):
    """A decoding rule for rows of ``cols`` elements, which interpreter.py and, if it can, the compiled kernel execute.

        value = ((level of the code - zero) · scale + shift) · factor        each operation rounds to float32

    Then a low-rank product is added, and columns are rotated.
    """

    codes: Entry
    cols: int
    element: ElementType | None = None  # the type of codes that are numbers
    levels: tuple[float, ...] = ()  # the value of each code of 1 to 8 bits
    # These functions return a number for each block of ``group`` columns of a chunk; for 0, for each row or element.
    scale: BlockNumbers | None = None
    zero: BlockNumbers | None = None
    shift: BlockNumbers | None = None
    group: int = 0
    order: Order = Order.ROWS  # codes follow each other in a stream of bits, low bits first
    ends: tuple[int, ...] = ()  # the bytes of saturated codes, at most three
    rotation: int = 0  # number of columns that are rotated together (rotation.py), a power of two; 0: none
    stored: StoredScales | None = None  # derived from a grid; the kernel reads these instead of calling ``scale``
    shared: SharedBytes | None = None  # only with Order.SHARED_BYTES
    factor: float | Grid | None = None  # one number for all columns, or one for each
    columns: Entry | None = None  # (cols,) int32: the block of each column, if they are not in order; needs ``stored``
    high_first: bool = False  # the first of two codes in a byte is in the high bits
    grid: Callable[[], Tensor] | None = None  # makes the levels of the indices of ggml's IQ1 to IQ3, (indices, n) int8
    blocks: BlocksStruct | None = None  # only with ElementType.BLOCKS: blocks that hold codes and their scales
    # Returns the codes of a chunk of whole groups, (r, c), which are stored in another order; usually a grid with a
    # number for each element. Codes are whole numbers if they have levels, otherwise values; of blocks, also values.
    read: Callable[[Chunk, Workspace], Tensor] | None = None
    low_rank: LowRank | None = None
    rows: int = 0  # rows of each matrix of a stack, without padding; 0: no stack with padding
    stored_rows: int = 0  # rows of each matrix with padding

    def __post_init__(self) -> None:
        """Derive ``stored`` if the scales are a grid."""
        if self.stored is None and isinstance(self.scale, Grid):
            self.stored = StoredScales.of(self.scale)

    @property
    def storage_unit(self) -> tuple[int, int]:
        """The (elements, bytes) of the smallest unit of storage."""
        if self.blocks is not None:
            return self.blocks.elements, self.blocks.n_bytes
        if self.levels and self.read is None and self.order in (Order.ROWS, Order.WORDS_DOWN):
            shared = gcd(self.bits, 8)
            return 8 // shared, self.bits // shared
        return (1, 1) if self.element is None else BITS[self.element]

    @property
    def bits(self) -> int:
        """The bits of a code that has levels."""
        return len(self.levels).bit_length() - 1

    @property
    def native(self) -> ElementType | None:
        """The type by which the compiled kernel reads the codes; None if it cannot."""
        if (self.read is not None and self.element is None) or (self.columns is not None and self.stored is None):
            return None
        if self.factor == 0 or isinstance(self.factor, Grid) or self.low_rank is not None:
            return None
        if self.rotation > MAX_ROTATED_COLUMNS or self.rows != self.stored_rows:
            return None
        if self.order == Order.WORDS_DOWN and self.codes.bits != WORD_BITS:
            return None
        if not self.levels:
            return self.element
        return None if 8 % self.bits else ElementType.TABLE

    def make_table(self) -> Tensor | None:
        """Return the table for the kernel: the levels of the codes in each byte, (256, codes) float32, or the grid."""
        if self.levels:
            return tabulate(self.levels, self.high_first, self.storage_unit[0])
        return self.grid() if self.grid is not None else None


def tabulate(levels: tuple[float, ...], high_first: bool = False, n_codes: int = 0) -> Tensor:
    """Return the levels of the first ``n_codes`` codes in each byte, (256, n_codes) float32; 0 means all."""
    return _tabulate(array("d", levels).tobytes(), high_first, n_codes)


@lru_cache(maxsize=64)  # cached, as many weights have the same levels: by their bytes, as 0.0 and -0.0 compare equal
def _tabulate(packed: bytes, high_first: bool, n_codes: int) -> Tensor:
    levels = torch.tensor(array("d", packed), dtype=torch.float32)
    bits = len(levels).bit_length() - 1
    shifts = torch.arange(0, 8, bits)[: n_codes or None]
    codes = torch.arange(256)[:, None] >> (shifts.flip(0) if high_first else shifts) & len(levels) - 1
    return levels[codes]
