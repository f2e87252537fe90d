"""Codes in tiles, each of which stores its bits together in a special order.

    tile     32-bit words; a code is the bits from ``shift``, below 32, on in two of the words: low | high << 32
    value    table[code]; the number of entries in the table is a power of two

The compiled kernel looks up the same values or, if a :class:`Generator` is known, computes them.
"""

from typing import NamedTuple

from quanterr.kernel.library import choose_kernel
from quanterr.lazy_torch import Tensor, torch


class TileLayout(NamedTuple):
    """The places of the codes in a tile of ``height`` · ``width`` elements, row by row."""

    height: int
    width: int
    codes: Tensor  # (height · width, 3) int32: low word, high word, shift


class Generator(NamedTuple):
    """The rule that generates a table of 16-bit codes.

    A code gives the 32 bits (code · factor + term) & 0x8FFF8FFF ^ 0x3B603B60; its value is the sum of the two float16
    numbers in them.
    """

    factor: int
    term: int

    def make_table(self) -> Tensor:
        """Return the value of each code, (65536,) float32."""
        halves = (torch.arange(1 << 16) * self.factor + self.term) & 0x8FFF8FFF ^ 0x3B603B60
        low, high = halves.to(torch.uint32).view(torch.float16).view(-1, 2).float().unbind(1)
        return low + high


def look_up(tiles: Tensor, layout: TileLayout, table: Tensor, generator: Generator | None = None) -> Tensor:
    """Return the values of tiles, (rows, cols, words) int32 with the words of a tile in order, as float32.

    ``table`` is float32; ``generator`` is its rule, if it has one and tiles have at most 256 codes. The result is
    (rows · height, cols · width).
    """
    (rows, cols, _), (height, width, codes) = tiles.shape, layout
    kernel = choose_kernel().kernel if tiles.device.type == "cpu" else None
    if kernel is None:
        elements = table[_extract(tiles, codes).long() & len(table) - 1]  # (codes, tiles)
        return elements.view(height, width, rows, cols).permute(2, 0, 3, 1).reshape(rows * height, cols * width)
    values = torch.empty(rows * height, cols * width)
    words, (row_step, col_step, _) = tiles.data_ptr(), tiles.stride()
    stored = words, rows, cols, row_step, col_step, codes.data_ptr(), height, width
    if generator is None:
        kernel.library.quanterr_look_up_tiles(*stored, len(table) - 1, table.data_ptr(), values.data_ptr())
    else:
        kernel.library.quanterr_generate_tiles(*stored, *generator, values.data_ptr())
    return values


def _extract(tiles: Tensor, codes: Tensor) -> Tensor:
    """Return the bits from each code of each tile on, (codes, tiles) int32."""
    stored, (low, high, shift) = tiles.permute(2, 0, 1).flatten(1), codes.t().unsqueeze(2)
    fields: Tensor = stored[low.view(-1)] >> shift & ~(-2 << 31 - shift) | stored[high.view(-1)] << 1 << 31 - shift
    return fields
