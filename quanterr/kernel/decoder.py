"""Decoding rules as data: interpreter.py specifies their values, and the compiled kernel carries out most of them."""

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

WORD = 32  # bits
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
    def of(cls, grid: Grid) -> "StoredScales | None":
        """Return the scales of a grid; None if they must be converted, or a stack stores them matrix by matrix."""
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
    """The codes of several rows in each byte: of rows r, r + ``step``, r + 2 · ``step`` … of the weight.

    Codes have ``bits`` bits; ``shifts`` has the lowest bit of each row's codes.
    """

    step: int
    shifts: tuple[int, ...]
    bits: int


class LowRank(Struct, frozen=True, gc=False):
    """A low-rank product in a weight, which runtimes multiply by inputs that they have not rounded (SVDQuant, SDNQ).

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
        """Return the weight's values in a chunk, (r, c) float32, from those of its codes."""
        of_columns = Chunk(chunk.col, chunk.stop_col, 0, self.down.width)
        wide = values.double()
        smooth = None if self.smooth is None else self.smooth(of_columns, workspace).t().double()
        if smooth is not None and not self.smoothed:
            wide = wide / smooth
        up, down = self.up(chunk, workspace).double(), self.down(of_columns, workspace).t().double()
        wide = torch.addmm(wide, up, down)
        return (wide / smooth if smooth is not None and self.smoothed else wide).float()

    def read_factors(self, matrix: tuple[int, int], rotation: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Return the factors of a weight of (rows, cols), (rows, rank) and (rank, cols) float32, for plain inputs.

        ``rotation`` is the decoder's.
        """
        rows, cols = matrix
        up = self.up(Chunk(0, rows, 0, self.up.width), workspace)
        of_columns = Chunk(0, cols, 0, self.down.width)
        down = self.down(of_columns, workspace).t()
        if self.smooth is not None and self.smoothed:
            down = down / self.smooth(of_columns, workspace).t()
        return up.clone(), rotate(down.contiguous().clone(), rotation) if rotation else down.clone()


class Decoder(Struct, gc=False):
    """A decoding rule, (value of the code - zero) · scale or value · scale + shift, for rows of ``cols`` elements.

    Each operation rounds to float32. The result is multiplied by ``factor``, a number or a grid of a number for
    each column, if there is one, and the ``low_rank`` product is added. ``levels`` has the value
    of each code of 1 to 8 bits, 2^bits of them; codes follow each other in a stream of bits, low bits first, or from
    the high bits of each byte if ``high_first`` (4 bits). Codes without levels are numbers of type ``element``.
    ``grid``, for ggml's IQ1 to IQ3, makes the levels of each index, (entries, levels) int8. ``scale``, ``zero`` and
    ``shift`` return one value per block of ``group`` columns of a chunk; if ``group`` is 0, one per row or element.
    ``ends`` are the bytes of saturated codes, at most three. If ``rotation``, a power of two, is not
    0, columns are finally rotated in groups of that size, as rotation.py specifies. ``stored``, which
    follows from a grid, describes the file's tensor of scales: the kernel reads them itself instead of calling
    ``scale``. ``shared`` describes rows in Order.SHARED_BYTES. ``columns``, (cols,) int32, is the block of each column
    where columns of a block are not next to each other; the kernel then needs ``stored``. ``blocks``, for
    ElementType.BLOCKS, describes blocks that hold their own scales. Codes in another order have a function ``read``,
    usually a grid of a number for each element, which returns those of a chunk of whole groups, (r, c): whole numbers
    if codes have levels, else float32 (or float64). The rows of each matrix of a stack, ``rows`` of them, may be
    stored with padding, as ``stored_rows``.
    """

    codes: Entry
    cols: int
    element: ElementType | None = None
    levels: tuple[float, ...] = ()
    scale: OfBlocks | None = None
    zero: OfBlocks | None = None
    shift: OfBlocks | None = None
    group: int = 0
    order: Order = Order.ROWS
    ends: tuple[int, ...] = ()
    rotation: int = 0
    stored: StoredScales | None = None
    shared: SharedBytes | None = None
    factor: float | Grid | None = None
    columns: Entry | None = None
    high_first: bool = False
    grid: Callable[[], Tensor] | None = None
    blocks: BlocksStruct | None = None
    read: Callable[[Chunk, Workspace], Tensor] | None = None
    low_rank: LowRank | None = None
    rows: int = 0
    stored_rows: int = 0

    def __post_init__(self) -> None:
        """Describe the scales of a grid."""
        if self.stored is None and isinstance(self.scale, Grid):
            self.stored = StoredScales.of(self.scale)

    @property
    def storage_unit(self) -> tuple[int, int]:
        """The (elements, bytes) of the smallest unit of storage."""
        if self.blocks is not None:
            return self.blocks.elements, self.blocks.n_bytes
        if self.read is not None:
            return 1, 1
        if self.levels and self.order in (Order.ROWS, Order.WORDS_DOWN):
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
        if self.read is not None or (self.columns is not None and self.stored is None):
            return None
        if self.factor == 0 or isinstance(self.factor, Grid) or self.low_rank is not None:
            return None
        if self.rotation > MOST_ROTATED or self.rows != self.stored_rows:
            return None
        if self.order == Order.WORDS_DOWN and self.codes.bits != WORD:
            return None
        if not self.levels:
            return self.element
        return None if 8 % self.bits else ElementType.TABLE

    def make_table(self) -> Tensor | None:
        """Return what the kernel looks up: the levels of the codes in each byte, (256, codes) float32, or the grid."""
        if self.levels:
            return tabulate(self.levels, self.high_first, self.storage_unit[0])
        return self.grid() if self.grid is not None else None


@lru_cache(maxsize=64)  # weights share their levels
def tabulate(levels: tuple[float, ...], high_first: bool = False, each: int = 0) -> Tensor:
    """Return the levels of the first ``each`` codes in each byte, (256, each) float32; of all if ``each`` is 0."""
    bits = len(levels).bit_length() - 1
    shifts = torch.arange(0, 8, bits)[: each or None]
    codes = torch.arange(256)[:, None] >> (shifts.flip(0) if high_first else shifts) & len(levels) - 1
    return torch.tensor(levels, dtype=torch.float32)[codes]
