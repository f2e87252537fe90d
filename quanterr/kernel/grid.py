"""Numbers that blocks of a weight share, such as scales and zero points, and how they are read for a chunk."""

from __future__ import annotations

from functools import cache
from math import nan
from typing import TypeVar

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.kernel.packing import CodePacking
from quanterr.kernel.tiles import Tiles
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

MAX_READ_WHOLE = 1 << 14  # maximum count of numbers that are read as a whole, which later chunks of the weight then use
UNLIMITED_ROWS = 1 << 62  # more rows than any weight has
E8M0 = (*(2.0 ** (code - 127) for code in range(255)), nan)
Rows = TypeVar("Rows", int, Tensor)  # a row, or several


class Grid(Struct, frozen=True, gc=False):
    """The numbers of blocks of ``height`` rows and ``group`` columns; if ``group`` is 0, all numbers of a row are read.

    They are stored by rows, (rows / height, width), or if ``turned``, by columns, (width, rows / height). A stack
    stores one such matrix after the other, with ``down`` rows for each ``stack_rows`` rows of the weight. A single
    number applies to all elements. ``key`` names the buffer of the numbers.

    With ``packing``, the numbers are codes, and each row (or column) of codes is packed in containers; these follow
    each other, or if ``words_down``, lie in a column (or row). With ``tiles``, numbers are stored in that order.
    ``levels`` has the value of each code, or of each byte.

    Then ``steps`` change the numbers. Each is the name of a method of tensors and its operand, if it takes one: a
    number, or a grid of blocks that are at least as wide. Each step rounds to float32.

    As a function, a grid returns the numbers of a chunk, (1 or r, blocks) float32; codes without levels as uint8.
    """

    entry: Entry
    width: int = 1
    group: int = 0
    height: int = 1
    turned: bool = False
    key: str = "scale"
    stack_rows: int = 0  # 0: the weight is one matrix
    down: int = 0
    levels: tuple[float, ...] = ()
    packing: CodePacking | None = None
    words_down: bool = False
    tiles: Tiles | None = None
    steps: tuple[tuple[str, Grid | float | None], ...] = ()

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the numbers of a chunk, (1 or r, blocks) float32, or uint8 codes."""
        return self._take_steps(self._read(chunk, workspace), chunk, workspace)

    def make_table(self, workspace: Workspace) -> Tensor:
        """Return the value of each byte after all steps, (256,) float32; operands must be single numbers."""
        stored = _make_table(self.levels, workspace.device).view(1, -1)
        return self._take_steps(stored, Chunk(0, 1, 0, 1), workspace).view(-1)

    def _take_steps(self, numbers: Tensor, chunk: Chunk, workspace: Workspace) -> Tensor:
        for operation, operand in self.steps:
            operands = () if operand is None else (self._read_operand(operand, chunk, workspace),)
            numbers = getattr(numbers, operation)(*operands)
        return numbers

    def _read_operand(self, operand: Grid | float, chunk: Chunk, workspace: Workspace) -> Tensor | float:
        if not isinstance(operand, Grid):
            return operand
        numbers = operand(chunk, workspace)
        if operand.group in (0, self.group):
            return numbers
        columns = torch.arange(chunk.col // self.group, -(-chunk.stop_col // self.group), device=numbers.device)
        return numbers[:, columns * self.group // operand.group - chunk.col // operand.group]

    def _read(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the numbers of a chunk as they are stored, (1 or r, blocks)."""
        if self.entry.n == 1 and not (self.packing or self.tiles):
            return self._to_float(workspace.read_whole(self.key, self.entry)).view(1, 1)
        first, stop = self._find_row(chunk.row), self._find_row(chunk.stop_row - 1) + 1
        numbers = self._read_rows(first, stop, workspace)
        if self.group:
            numbers = numbers[:, chunk.col // self.group : -(-chunk.stop_col // self.group)]
        numbers = self._to_float(numbers)
        if len(numbers) == 1 or (self.height == 1 and self.down == self.stack_rows):  # one row for all, or one for each
            return numbers
        rows = torch.arange(chunk.row, chunk.stop_row, device=numbers.device)
        return numbers.index_select(0, self._find_row(rows) - first)

    def _to_float(self, stored: Tensor) -> Tensor:
        if self.levels:
            return look_up_bytes(stored, self.levels)
        return stored if self.packing or (self.tiles and self.tiles.bits) else stored.float()

    def _find_row(self, row: Rows) -> Rows:
        """Return the row of numbers that belongs to a row, or to each of several rows, of the weight."""
        if not self.stack_rows:
            return row // self.height
        return row // self.stack_rows * self.down + row % self.stack_rows // self.height

    def _read_rows(self, first: int, stop: int, workspace: Workspace) -> Tensor:
        """Read rows of numbers, (stop - first, width)."""
        if self.tiles is not None:
            return self.tiles.read(self.key, self.entry, self.width, first, stop, workspace)
        if self.turned:
            return self._read_columns(first, stop, workspace)
        if self.packing is None:
            return self._read_in_order(self.width, first, stop, workspace)
        if self.words_down:
            containers = workspace.read_whole(self.key, self.entry)[:, first:stop].t()
        else:
            width = self.packing.count(self.width, self.entry.bits)
            containers = self._read_in_order(width, first, stop, workspace)
        return self.packing.unpack(containers, 0, self.width)

    def _read_in_order(self, width: int, first: int, stop: int, workspace: Workspace) -> Tensor:
        if self.entry.n <= MAX_READ_WHOLE:
            return workspace.read_whole(self.key, self.entry).view(-1, width)[first:stop]
        return workspace.read_cached(self.key, self.entry, first * width, (stop - first, width))

    def _read_columns(self, first: int, stop: int, workspace: Workspace) -> Tensor:
        """Read rows of numbers that are stored by columns, matrix by matrix."""
        size = self.entry.n // (self.entry.shape[0] if self.stack_rows else 1)
        down = self.down or (UNLIMITED_ROWS if self.packing else size // self.width)
        matrix, last = first // down, (stop - 1) // down
        shape = (last + 1 - matrix, *((-1, self.width) if self.words_down else (self.width, -1)))
        stored = workspace.read_cached(self.key, self.entry, matrix * size, (last + 1 - matrix, size)).view(shape)
        columns = stored.transpose(1, 2) if self.words_down else stored
        begin, end = (first - matrix * down, stop - matrix * down) if matrix == last else (0, down)
        columns = self.packing.unpack(columns, begin, end) if self.packing else columns[..., begin:end]
        rows = columns.transpose(1, 2).reshape(-1, self.width)
        return rows if matrix == last else rows[first - matrix * down : stop - matrix * down]


class Run(Struct, frozen=True, gc=False):
    """Numbers that ``size`` consecutive elements share; elements are counted row by row, with ``cols`` in each row.

    If ``n`` is not 0, the numbers repeat after ``n`` elements. As a function, a run returns the numbers of the elements
    of a chunk, (r, c) float32.
    """

    entry: Entry
    cols: int
    size: int = 1
    n: int = 0
    key: str = "scale"

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the numbers of a chunk, (r, c) float32."""
        places = self.find_places(chunk, workspace)
        if self.n or self.entry.n <= MAX_READ_WHOLE:
            return workspace.read_whole(self.key, self.entry).view(-1)[places].float()
        first, stop = int(places[0, 0]), int(places[-1, -1]) + 1
        return workspace.read_cached(self.key, self.entry, first, (stop - first,))[places - first].float()

    def find_places(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the index of the number of each element, (r, c) int64."""
        rows = torch.arange(chunk.row, chunk.stop_row, device=workspace.device)
        elements = rows[:, None] * self.cols + torch.arange(chunk.col, chunk.stop_col, device=workspace.device)
        return (elements % self.n if self.n else elements) // self.size


def of_columns(entry: Entry, key: str) -> Grid:
    """Return a grid with a number for each column of a weight, or with one number for all."""
    return Grid(entry, entry.n, 1, UNLIMITED_ROWS, key=key)


@cache
def _make_table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


def look_up_bytes(stored: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the values of bytes, float32; on the CPU, this is faster than arithmetic and torch's casts."""
    places = stored.contiguous().view(torch.uint8).view(-1).int()
    return _make_table(levels, stored.device).index_select(0, places).view(stored.shape)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Convert E8M0 exponents, bytes, to float32: 2^(code - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    return look_up_bytes(codes, E8M0)
