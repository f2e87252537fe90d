"""Marlin: codes in the order in which the Marlin kernels read them.

    awq_marlin     qweight          i32               (cols / 16, 2 · rows), codes of 4 bits
                   scales           f16, bf16, f32    (blocks, rows)
    gptq_marlin    B, s             the same
    ct_marlin24    weight_packed    i32               (cols / 32, rows · b / 2), codes of 4 or 8 bits
                   scale_packed     f16, bf16, f32    (blocks, rows)
                   meta             i16               (cols / 32, 2 · rows): columns of the codes

    weight[r, c] = (code[r, c] - 2^(b-1)) * scale[r, c // size]    exact for 16-bit scales
    ct_marlin24: two of every four columns have a code, the others are 0

Codes are in tiles of 16 kept columns and 64 rows, as a tensor core reads them. In the order of the words:

    awq, gptq      row % 8, column % 8 // 2, row % 64 // 16; in a word: column % 2, row % 16 // 8, column // 8
    24, 4 bits     row % 64 // 16, row % 16 // 8, column % 8 // 2, row % 4; in a word: column % 2,
                   row % 8 // 4, column // 8
    24, 8 bits     row % 64 // 16, row % 16 // 8, column % 8 // 2, row % 4, row % 8 // 4; in a word:
                   column % 2, column // 8

Scales, in runs of 64 rows: number 8 i + j belongs to row i + 8 j; if one scale serves a whole row, in runs of 32:
8 i + 2 j + k belongs to row 8 j + 2 i + k. ct_marlin24: 8 i + 2 j + k belongs to row 8 i + j + 4 k if blocks are
shorter than half a row; otherwise scales are in order.

meta has 16 bits for 16 columns of a row: each 2 bits are the column of a kept element within its four. The bits of row
r and its c-th 16 columns are, in the order of CUTLASS (reorder_meta), at [c // 2, 2 d + c % 2] with
d = r // 64 · 64 + r % 64 // 8 · 4 + r % 8 // 4 + r % 4 // 2 · 32 + r % 2 · 2, where d and c first swap their last bits
if these differ.

Reference: IST-DASLab/marlin marlin/__init__.py; AutoGPTQ/AutoGPTQ@0.7.1 nn_modules/qlinear/qlinear_marlin.py;
casper-hansen/AutoAWQ@88e4c76b awq/modules/linear/marlin.py; vllm-project/compressed-tensors@0.13.0
compressors/sparse_quantized_compressors/marlin_24.py, utils/semi_structured_conversions.py.
"""

from functools import cache, partial
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Format, FormatMismatch, Native, Parts, PartSpec, Weight, Workspace
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.gptq_awq_common import FLOATS, WORDS, declared_group_size
from quanterr.kernel.decoder import OfBlocks
from quanterr.kernel.levels import uniform
from quanterr.lazy_torch import Tensor, torch

ROWS, COLS = 64, 16  # size of a tile

NEEDS = {
    "awq_marlin": {"codes": PartSpec(("{module}.qweight",), WORDS), "scale": PartSpec(("{module}.scales",), FLOATS)},
    "gptq_marlin": {"codes": PartSpec(("{module}.B",), WORDS), "scale": PartSpec(("{module}.s",), FLOATS)},
    "ct_marlin24": {
        "codes": PartSpec(("{weight}_packed",), WORDS),
        "scale": PartSpec(("{module}.scale_packed",), FLOATS),
        "meta": PartSpec(("{module}.meta",), frozenset({"I16"})),
    },
}


class TileOrder(NamedTuple):
    """The layout of the words in a tile: the sizes of their dimensions, and the permutation that puts rows first.

    In ``order``, dimension 0 is tiles of columns, 1 is tiles of rows, and 2 and up are the dimensions of ``words``.
    """

    bits: int
    words: tuple[int, ...]
    order: tuple[int, ...]


class RowOrder(NamedTuple):
    """The order of scales: the sizes of the dimensions of a run of rows, and the permutation that puts rows in order.

    In ``order``, dimension 0 is blocks, 1 is runs, and 2 and up are the dimensions of ``dims``.
    """

    dims: tuple[int, ...]
    order: tuple[int, ...]


DENSE = TileOrder(4, (8, 4, 4), (1, 4, 2, 0, 3))
SPARSE = {4: TileOrder(4, (4, 2, 4, 4), (1, 2, 3, 5, 0, 4)), 8: TileOrder(8, (4, 2, 4, 4, 2), (1, 2, 3, 6, 5, 0, 4))}


def fit_dense(parts: Parts) -> Weight | None:
    """Return the weight if the shapes fit Marlin."""
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) != 2 or len(scale.shape) != 2 or codes.shape[1] != 2 * scale.shape[1] or scale.shape[1] % ROWS:
        return None
    shape = scale.shape[1], COLS * codes.shape[0]
    blocks = fit_blocks(scale.shape[0], shape[1], declared_group_size(parts))
    dims, order = ((8, 8), (1, 3, 2, 0)) if blocks.n > 1 else ((4, 4, 2), (1, 3, 2, 4, 0))
    read = partial(_read_dense, parts.codes)
    return _make_weight(parts, shape, DENSE, blocks, list_integers(4, 8), read, RowOrder(dims, order))


def fit_sparse(parts: Parts) -> Weight:
    """Return a weight with codes for two of every four columns."""
    codes, scale, meta = parts.codes, parts["scale"], parts["meta"]
    shapes = [entry.shape for entry in (codes, scale, meta)]
    rows, width = (scale.shape or (0,))[-1], (codes.shape or (0,))[-1]
    tiles = SPARSE.get(2 * width // rows) if rows and rows % ROWS == 0 == 2 * width % rows else None
    if tiles is None or any(len(shape) != 2 for shape in shapes) or meta.shape != (codes.shape[0], 2 * rows):
        raise FormatMismatch(
            f"{codes}, {scale} and {meta} do not belong together: expected (cols / 32, rows · bits / 2) with 4 or 8 "
            "bits, (blocks, rows) and (cols / 32, 2 · rows), with a multiple of 64 rows"
        )
    shape = rows, 2 * COLS * codes.shape[0]
    blocks = fit_blocks(scale.shape[0], shape[1])
    order = RowOrder((8, 4, 2), (1, 2, 4, 3, 0) if blocks.n > 2 else (1, 2, 3, 4, 0))
    return _make_weight(parts, shape, tiles, blocks, (), partial(_read_sparse, parts, tiles), order)


def _make_weight(
    parts: Parts,
    shape: tuple[int, int],
    tiles: TileOrder,
    blocks: ColumnBlocks,
    levels: tuple[float, ...],
    read: OfBlocks,
    order: RowOrder,
) -> Weight:
    scale = blocks.restrict(partial(_read_scales, parts["scale"], order))
    decoder = Decoder(parts.codes, shape[1], levels=levels, scale=scale, group=blocks.group, read=read)
    return parts.weight(
        shape,
        Native(decoder),
        block_size=blocks.edges,
        code_bits=tiles.bits,
        uniform_bits=tiles.bits,
        levels=uniform(tiles.bits),
        scale=parts["scale"],
        evidence=(f"{tiles.bits}-bit codes {parts.codes}, scales {parts['scale']}",),
        warnings=blocks.warnings,
    )


def _read_dense(entry: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the codes of a chunk, (r, c) float32."""
    top, bottom = chunk.row // ROWS, -(-chunk.stop_row // ROWS)
    left, right = chunk.col // COLS, -(-chunk.stop_col // COLS)
    codes = _read_codes(entry, DENSE, (top, bottom), (left, right), workspace)
    return _cut(codes, chunk, ROWS * top, COLS * left)


def _read_sparse(parts: Parts, tiles: TileOrder, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read code - 2^(b-1) where there is a code, else 0, of a chunk: (r, c) float32."""
    top, bottom = chunk.row // ROWS, -(-chunk.stop_row // ROWS)
    left, right = chunk.col // (2 * COLS), -(-chunk.stop_col // (2 * COLS))
    codes = _read_codes(parts.codes, tiles, (top, bottom), (left, right), workspace) - (1 << tiles.bits - 1)
    columns = _read_kept_columns(parts["meta"], (top, bottom), (left, right), workspace)
    values = codes.new_zeros(len(codes), 2 * codes.shape[1]).scatter_(1, columns, codes)
    return _cut(values, chunk, ROWS * top, 2 * COLS * left)


def _cut(tiles: Tensor, chunk: Chunk, row: int, col: int) -> Tensor:
    """Cut a chunk, (r, c), out of tiles that begin at ``row`` and ``col`` of the weight."""
    return tiles[chunk.row - row : chunk.stop_row - row, chunk.col - col : chunk.stop_col - col]


def _read_scales(entry: Entry, order: RowOrder, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the scales of a chunk's rows, (r, blocks) float32."""
    top, bottom = chunk.row // ROWS, -(-chunk.stop_row // ROWS)
    stored = workspace.read_whole("scales", entry)[:, ROWS * top : ROWS * bottom]
    rows = stored.reshape(len(stored), -1, *order.dims).permute(order.order).reshape(-1, len(stored)).float()
    return rows[chunk.row - ROWS * top : chunk.stop_row - ROWS * top]


def _read_codes(
    entry: Entry, tiles: TileOrder, rows: tuple[int, int], cols: tuple[int, int], workspace: Workspace
) -> Tensor:
    """Read the codes of tile rows and columns, each (first, stop), as float32: (64 · tile rows, 16 · tile columns)."""
    width = 16 * tiles.bits * 2  # words of 64 rows
    words = workspace.read_whole("columns", entry)[cols[0] : cols[1], width * rows[0] : width * rows[1]]
    words = words.view(len(words), rows[1] - rows[0], *tiles.words).permute(tiles.order)
    transposed = workspace.buffer("turned", tuple(words.shape), torch.int32).copy_(words)
    halves = transposed.view(-1, *transposed.shape[-3:]).view(torch.int16)
    many, low_rows, n, _ = halves.shape
    code = workspace.buffer("code", tuple(halves.shape), torch.int16)
    codes = workspace.output((many, 16 // tiles.bits // 2, low_rows, n, 2, 8))
    for place in range(16 // tiles.bits):
        torch.bitwise_right_shift(halves, place * tiles.bits, out=code).bitwise_and_((1 << tiles.bits) - 1)
        codes[:, place // 2, :, :, place % 2].copy_(code)
    return codes.view(-1, COLS * n)


def _read_kept_columns(entry: Entry, rows: tuple[int, int], cols: tuple[int, int], workspace: Workspace) -> Tensor:
    """Return the column of each code, relative to the first tile: (64 · tile rows, 16 · tile columns) int64."""
    width = 2 * ROWS
    stored = workspace.read_whole("meta", entry)[cols[0] : cols[1], width * rows[0] : width * rows[1]]
    order = torch.tensor(_find_places(), device=stored.device)
    found = stored.view(len(stored), -1, width).index_select(2, order)  # (tiles of columns, tiles of rows, 64 · 2)
    words = found.view(*found.shape[:2], ROWS, 2).permute(1, 2, 0, 3).reshape(-1, 2 * stored.shape[0], 1)
    columns = workspace.buffer("kept_columns", (words.shape[0], words.shape[1], 8), torch.int64)
    for code in range(8):
        columns[:, :, code : code + 1].copy_((words >> 2 * code) & 3)
    starts = torch.arange(0, 8 * words.shape[1], device=stored.device).view(-1, 8) // 2 * 4
    return columns.add_(starts).view(words.shape[0], -1)


@cache
def _find_places() -> list[int]:
    """Return the index of each meta word: at 2 r + c for row r of 64 and the c-th of two runs of 16 columns."""
    places = []
    for row in range(ROWS):
        for col in range(2):
            d = row // 8 * 4 + row % 8 // 4 + row % 4 // 2 * 32 + row % 2 * 2
            c, d = d % 2, d - d % 2 + col
            places.append(2 * d + c)
    return places


FORMATS = (
    *(
        Format(
            name,
            NEEDS[name],
            fit_dense,
            summary="integers of 4 bits in the order of the Marlin kernels, a scale for each block of columns",
            usual_db=(17, 21),
        )
        for name in ("awq_marlin", "gptq_marlin")
    ),
    Format(
        "ct_marlin24",
        NEEDS["ct_marlin24"],
        fit_sparse,
        summary="integers of 4 or 8 bits in two of every four columns, in the order of the Marlin kernels",
        usual_db=(17, 41),
    ),
)
