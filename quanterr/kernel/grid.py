"""The numbers that blocks of a weight share, such as scales and zero points: which one belongs to each element."""

from __future__ import annotations

from functools import cache
from math import nan
from typing import TypeVar

from msgspec import Struct

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

FEW = 1 << 14  # most numbers that are read at once, so that later chunks of the weight need no further read
MANY = 1 << 62  # more rows than any weight has
E8M0 = (*(2.0 ** (code - 127) for code in range(255)), nan)
Rows = TypeVar("Rows", int, Tensor)  # a row, or several


class Grid(Struct, frozen=True, gc=False):
    """The numbers of blocks of ``height`` rows and ``group`` columns; if ``group`` is 0, a row needs all its numbers.

    They are stored by rows, (rows / height, width), or if ``turned``, by columns, (width, rows / height). A stack
    stores one such matrix after the other, of ``down`` rows for each ``stack_rows`` rows of the weight. A single number
    belongs to all elements. ``key`` names the buffer that holds them. As a function, a grid returns the numbers of a
    chunk, (1 or r, blocks) float32.
    """

    entry: Entry
    width: int = 1
    group: int = 0
    height: int = 1
    turned: bool = False
    key: str = "scale"
    stack_rows: int = 0  # 0: the weight is one matrix
    down: int = 0
    levels: tuple[float, ...] = ()  # what each byte stands for, if numbers are bytes

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the numbers of a chunk, (1 or r, blocks) float32."""
        if self.entry.n == 1:
            return self._to_float(workspace.read_whole(self.key, self.entry)).view(1, 1)
        first, stop = self._find_row(chunk.row), self._find_row(chunk.stop_row - 1) + 1
        numbers = self._to_float(self._read_rows(first, stop, workspace))
        if self.group:
            numbers = numbers[:, chunk.col // self.group : -(-chunk.stop_col // self.group)]
        if len(numbers) == 1 or (self.height == 1 and self.down == self.stack_rows):  # for all rows, or one for each
            return numbers
        rows = torch.arange(chunk.row, chunk.stop_row, device=numbers.device)
        return numbers.index_select(0, self._find_row(rows) - first)

    def _to_float(self, stored: Tensor) -> Tensor:
        return look_up_bytes(stored, self.levels) if self.levels else stored.float()

    def _find_row(self, row: Rows) -> Rows:
        """Return the row of numbers that belongs to a row, or to each of several rows, of the weight."""
        if not self.stack_rows:
            return row // self.height
        return row // self.stack_rows * self.down + row % self.stack_rows // self.height

    def _read_rows(self, first: int, stop: int, workspace: Workspace) -> Tensor:
        """Read rows of numbers, (stop - first, width)."""
        if self.turned:
            down = self.down or self.entry.n // self.width
            matrix, last = first // down, (stop - 1) // down
            shape = last + 1 - matrix, self.width, down
            stored = workspace.read_cached(self.key, self.entry, matrix * self.width * down, shape)
            if matrix == last:
                return stored[0, :, first - matrix * down : stop - matrix * down].t()
            return stored.transpose(1, 2).reshape(-1, self.width)[first - matrix * down : stop - matrix * down]
        if self.entry.n <= FEW:
            return workspace.read_whole(self.key, self.entry).view(-1, self.width)[first:stop]
        return workspace.read_cached(self.key, self.entry, first * self.width, (stop - first, self.width))


class Run(Struct, frozen=True, gc=False):
    """Numbers of elements that are counted row by row, of ``cols`` each: ``size`` elements share a number.

    After ``n`` elements, if ``n`` is not 0, the numbers begin again. As a function, a run returns the numbers of the
    elements of a chunk, (r, c) float32, or (1, 1) if there is one for all.
    """

    entry: Entry
    cols: int
    size: int = 1
    n: int = 0
    key: str = "scale"

    def __call__(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the numbers of a chunk, (r, c) float32."""
        places = self.find_places(chunk, workspace)
        if self.n or self.entry.n <= FEW:
            return workspace.read_whole(self.key, self.entry).view(-1)[places].float()
        first, stop = int(places[0, 0]), int(places[-1, -1]) + 1
        return workspace.read_cached(self.key, self.entry, first, (stop - first,))[places - first].float()

    def find_places(self, chunk: Chunk, workspace: Workspace) -> Tensor:
        """Return the index of the number of each element, (r, c) int64."""
        rows = torch.arange(chunk.row, chunk.stop_row, device=workspace.device)
        elements = rows[:, None] * self.cols + torch.arange(chunk.col, chunk.stop_col, device=workspace.device)
        return (elements % self.n if self.n else elements) // self.size


def of_columns(entry: Entry, key: str) -> Grid:
    """Return a number for each column of a weight, or one for all, as a grid."""
    return Grid(entry, entry.n, 1, MANY, key=key)


@cache
def _make_table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


def look_up_bytes(stored: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return what bytes stand for, float32; on the CPU this is faster than arithmetic and torch's casts."""
    places = stored.contiguous().view(torch.uint8).view(-1).int()
    return _make_table(levels, stored.device).index_select(0, places).view(stored.shape)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Convert E8M0 exponents, bytes, to float32: 2^(code - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    return look_up_bytes(codes, E8M0)
