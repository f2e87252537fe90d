"""Matrices that are stored in tiles, as runtimes' kernels read them.

The axes of the stored numbers are letters, the slowest first, each followed by its size; R and C count tiles of rows
and of columns. Some of these axes are the digits of a number's row, the others those of its column. For example, tiles
with the axes "R C a2 b4", rows "Rb" and columns "Ca" store row 4 R + b and column 2 C + a of a matrix at [R, C, a, b].
"""

from __future__ import annotations

import re
from functools import cache
from math import prod
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace

BYTE_BITS = 8


class Tiles(NamedTuple):
    """An order of numbers, or of codes of ``bits`` bits, which the last axes count in a container, low bits first.

    With ``high_first``, the first of two codes in a byte is in the high bits.
    """

    axes: str
    rows: str
    cols: str
    bits: int = 0
    high_first: bool = False

    def read(self, key: str, entry: Entry, width: int, first: int, stop: int, workspace: Workspace) -> Tensor:
        """Read rows ``first:stop`` of a matrix of ``width`` columns: numbers as they are stored, or codes as uint8."""
        parsed = _parse(self.axes, self.rows, self.cols)
        height, n_across = parsed.height, -(-width // parsed.width)
        top, bottom = first // height, -(-stop // height)
        size = (
            prod(parsed.sizes) * self.bits // BYTE_BITS if self.bits else prod(parsed.sizes)
        )  # bytes or numbers of a tile
        if self.axes.startswith("R"):
            read = workspace.read_bytes if self.bits else workspace.read
            stored = read(key, entry, top * n_across * size, (bottom - top, n_across, size))
        else:
            whole = workspace.read_whole(key, entry)
            stored = (whole.view(torch.uint8) if self.bits else whole).view(n_across, -1, size)[:, top:bottom]
        numbers = self._unpack(stored) if self.bits else stored
        numbers = numbers.reshape(*numbers.shape[:2], *parsed.sizes).permute(parsed.order)
        return numbers.reshape((bottom - top) * height, -1)[first - top * height : stop - top * height, :width]

    def _unpack(self, stored: Tensor) -> Tensor:
        """Return the codes in bytes, (…, bytes) to (…, codes) uint8."""
        codes = CodePacking("dense", self.bits).unpack(stored, 0, stored.shape[-1] * BYTE_BITS // self.bits)
        return codes.view(*codes.shape[:-1], -1, 2).flip(-1).flatten(-2) if self.high_first else codes


class _Parsed(NamedTuple):
    """The sizes of the axes after R and C, the permutation of all axes that puts rows first, and the size of a tile."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    height: int
    width: int


@cache
def _parse(axes: str, rows: str, cols: str) -> _Parsed:
    names = "".join(re.findall("[A-Za-z]", axes))
    sizes = {axis: int(size or 1) for axis, size in re.findall(r"([A-Za-z])(\d*)", axes)}
    order = tuple(names.index(axis) for axis in rows + cols)
    height, width = (prod(sizes[axis] for axis in digits) for digits in (rows, cols))
    return _Parsed(tuple(sizes[axis] for axis in names[2:]), order, height, width)
