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

from functools import cache, partial

from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.gptq_awq_common import WORDS
from quanterr.kernel.levels import INT4
from quanterr.lazy_torch import Tensor, torch

ROWS, COLS = 64, 16  # size of a tile
TILE = ROWS * COLS
NEEDS = {
    "codes": PartSpec(("{module}.B",), WORDS),
    "channel": PartSpec(("{module}.s_channel",), frozenset({"F32"})),
    "group": PartSpec(("{module}.s_group",), frozenset({"F16"}), optional=True),
}
# True: there are several groups
INTERLEAVE = {True: (0, 2, 4, 6, 1, 3, 5, 7), False: (4, 0, 5, 1, 6, 2, 7, 3)}
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
        partial(dequantize, parts, blocks, grouped),
        block_size=blocks.edges,
        code_bits=4,
        uniform_bits=None if grouped else 4,
        levels=None if grouped else INT4.scaled,
        scale=channel,
        evidence=(f"4-bit codes {codes}, {channel}, groups of {blocks.size} columns",),
    )


def dequantize(parts: Parts, blocks: ColumnBlocks, grouped: bool, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the values of a chunk, (r, c)."""
    top, bottom = chunk.row // ROWS, -(-chunk.stop_row // ROWS)
    left, right = chunk.col // COLS, -(-chunk.stop_col // COLS)
    words = workspace.read_whole("tiles", parts.codes)[left:right, top * 2 * ROWS : bottom * 2 * ROWS].contiguous()
    packed = element_types.unpack(words.view(torch.uint8), LEVELS[grouped]).view(-1, TILE)
    tiles = workspace.buffer("elements", tuple(packed.shape), torch.float32)
    torch.index_select(packed, 1, _find_places(grouped, workspace.device), out=tiles)
    ordered = workspace.buffer("ordered", (bottom - top, ROWS, right - left, COLS), torch.float32)
    ordered.copy_(tiles.view(right - left, bottom - top, ROWS, COLS).permute(1, 2, 0, 3))
    above, before = chunk.row - top * ROWS, chunk.col - left * COLS
    matrix = ordered.view((bottom - top) * ROWS, -1)
    values = workspace.output(chunk.shape)
    values.copy_(matrix[above : above + chunk.shape[0], before : before + chunk.shape[1]])
    rows = torch.arange(chunk.row, chunk.stop_row, device=workspace.device)
    if grouped:
        places = rows // 64 * 64 + rows % 8 * 8 + rows % 64 // 8
        scales = workspace.read_whole("groups", parts["group"]).index_select(1, places).t().float()
        groups = blocks.restrict(lambda _chunk, _workspace: scales)
        blocks.apply(torch.Tensor.mul_, values, groups, chunk, workspace).round_().clamp_(-128, 127)
    places = rows // 32 * 32 + rows % 8 // 2 * 8 + rows % 32 // 8 * 2 + rows % 2
    of_rows = workspace.read_whole("channels", parts["channel"]).view(-1)[places]
    return Values(values.mul_(of_rows.unsqueeze(1)))


@cache
def _find_places(grouped: bool, device: torch.device) -> Tensor:
    """Return the place among a tile's packed codes of each of its elements, row by row: (1024,) int64."""
    number = torch.arange(TILE)
    row, column = number // COLS, number % COLS
    word = 16 * (row % 8) + 4 * (column // 4) + row // 16
    inside = torch.tensor(INTERLEAVE[grouped]).argsort()[4 * (row % 16 // 8) + column % 4]
    return (8 * word + inside).to(device)


FORMATS = (Format("qqq", NEEDS, fit, summary="QQQ: 4-bit codes of INT8 values, a scale for each row and each group"),)
