"""QQQ: codes of 4 bits in the order of a Marlin kernel, whose values are INT8 before they are scaled.

    B            i32    (cols / 16, 2 · rows)
    s_channel    f32    (1, rows)
    s_group      f16    (groups, rows); empty or missing: one group

    several groups    int8[r, c] = (code - 8) * s_group[group of c, r], rounded to an integer from -128 to 127
    one group         int8[r, c] = 16 · code, in two's complement
    weight[r, c] = int8[r, c] * s_channel[r]                                                     rounded

Codes are in tiles of 16 columns and 64 rows: word 16 · s + 4 · q + t of a tile has rows s and s + 8 of its t-th 16
rows, at columns 4 · q to 4 · q + 3. The codes of a word, from the lowest bits, have numbers 0, 2, 4, 6, 1, 3, 5, 7 with
several groups, and 4, 0, 5, 1, 6, 2, 7, 3 with one; number 4 · h + n is column 4 · q + n of row s + 8 · h. Number
8 · i + j in each run of 64 of s_group belongs to row i + 8 · j; number 8 · i + 2 · j + k in each run of 32 of s_channel
belongs to row 8 · j + 2 · i + k.

Reference: ModelCloud/GPTQModel@f4c327a1 gptqmodel/nn_modules/qlinear/qqq.py, QQQTorchLinear.
"""

from __future__ import annotations

from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.gptq_awq_common import WORDS
from quanterr.formats.shared.marlin_order import GROUP_SCALE_TILES, ROW_SCALE_TILES
from quanterr.kernel.grid import Grid
from quanterr.kernel.interpreter import Nested
from quanterr.kernel.levels import INT4
from quanterr.kernel.tiles import Tiles

ROWS, COLS = 64, 16  # size of a tile
NEEDS = {
    "codes": PartSpec(("{module}.B",), WORDS),
    "channel": PartSpec(("{module}.s_channel",), frozenset({"F32"})),
    "group": PartSpec(("{module}.s_group",), frozenset({"F16"}), optional=True),
}
# True: there are several groups
TILES = {
    True: Tiles("C R s8 q4 t4 x2 h2 m2", "Rths", "Cqmx", 4),
    False: Tiles("C R s8 q4 t4 n4 h2", "Rths", "Cqn", 4, high_first=True),
}
LEVELS = {True: element_types.list_integers(4, 8), False: tuple(16 * value for value in element_types.INT4)}


def fit(parts: Parts) -> Weight:
    """Return the weight.

    Raises:
        FormatMismatch: codes and scales do not have shapes of one weight.
    """
    codes, channel, group = parts.codes, parts["channel"], parts.get("group")
    rows, cols = channel.n, COLS * (codes.shape or (0,))[0]
    if len(codes.shape) != 2 or codes.shape[1] != 2 * rows or rows % ROWS:
        raise FormatMismatch(f"{codes} should have two words for each of {channel}, in tiles of {ROWS} rows")
    grouped = group is not None and group.n > 0
    n = (group.shape or (1,))[0] if group is not None and grouped else 1
    if cols % n or (group is not None and grouped and group.shape != (n, rows)):
        raise FormatMismatch(f"{group} should have groups of one size of {cols} columns, and {rows} numbers for each")
    blocks = ColumnBlocks(n, cols // n)
    return parts.weight(
        (rows, cols),
        _read(parts, blocks, grouped),
        block_size=blocks.edges,
        code_bits=4,
        levels=None if grouped else INT4.centred_levels,
        scale=channel,
        evidence=(f"4-bit codes {codes}, {channel}, groups of {blocks.size} columns",),
    )


def _read(parts: Parts, blocks: ColumnBlocks, grouped: bool) -> Decoder:
    """Return the decoder of the weight: INT8 values times the scales of rows."""
    codes = parts.codes
    cols = COLS * codes.shape[0]
    code_grid = Grid(codes, cols, 1, key="codes", tiles=TILES[grouped])
    channel = Grid(parts["channel"], tiles=ROW_SCALE_TILES)
    if not grouped:
        return Decoder(codes, cols, levels=LEVELS[grouped], scale=channel, read=code_grid)
    group = Grid(parts["group"], blocks.n, blocks.size, key="group", tiles=GROUP_SCALE_TILES)
    inner = Decoder(codes, cols, levels=LEVELS[grouped], scale=group, group=blocks.size, read=code_grid)
    return Decoder(codes, cols, scale=channel, read=Nested(inner, (-128, 127)))


FORMATS = (Format("qqq", NEEDS, fit, summary="QQQ: 4-bit codes of INT8 values, a scale for each row and each group"),)
