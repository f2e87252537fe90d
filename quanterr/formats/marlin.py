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

from functools import partial

from msgspec.structs import replace

from quanterr.formats.base import Chunk, Decoder, Format, FormatMismatch, Parts, PartSpec, Weight, Workspace
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.gptq_awq_common import FLOATS, WORDS, read_declared_group_size
from quanterr.formats.shared.marlin_order import GROUP_SCALE_TILES, ROW_SCALE_TILES
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import uniform
from quanterr.kernel.tiles import Tiles
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


DENSE = Tiles("C R a8 b4 c4 d2 e2 f2", "Rcea", "Cfbd", 4)
SPARSE = {
    4: Tiles("C R a4 b2 c4 d4 e2 f2 g2", "Rabfd", "Cgce", 4),
    8: Tiles("C R a4 b2 c4 d4 e2 f2 g2", "Rabed", "Cgcf", 8),
}
META = Tiles("C R a2 b8 c2 d2 e2 f8", "Rbeac", "Cdf", 2)
SPARSE_SCALE_TILES = Tiles("C R i8 j4 k2", "Rikj", "C"), Tiles("C R i64", "Ri", "C")  # short blocks, other blocks


def fit_dense(parts: Parts) -> Weight | None:
    """Return the weight if the shapes fit Marlin."""
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) != 2 or len(scale.shape) != 2 or codes.shape[1] != 2 * scale.shape[1] or scale.shape[1] % ROWS:
        return None
    shape = scale.shape[1], COLS * codes.shape[0]
    blocks = fit_blocks(scale.shape[0], shape[1], read_declared_group_size(parts))
    decoder = Decoder(
        codes,
        shape[1],
        levels=list_integers(4, 8),
        scale=replace(blocks.grid(scale), tiles=GROUP_SCALE_TILES if blocks.n > 1 else ROW_SCALE_TILES),
        group=blocks.group,
        read=Grid(codes, shape[1], 1, key="codes", tiles=DENSE),
    )
    return _make_weight(parts, shape, 4, blocks, decoder)


def fit_sparse(parts: Parts) -> Weight:
    """Return a weight with codes for two of every four columns."""
    codes, scale, meta = parts.codes, parts["scale"], parts["meta"]
    shapes = [entry.shape for entry in (codes, scale, meta)]
    rows, width = (scale.shape or (0,))[-1], (codes.shape or (0,))[-1]
    bits = 2 * width // rows if rows and rows % ROWS == 0 == 2 * width % rows else 0
    if bits not in SPARSE or any(len(shape) != 2 for shape in shapes) or meta.shape != (codes.shape[0], 2 * rows):
        raise FormatMismatch(
            f"{codes}, {scale} and {meta} do not belong together: expected (cols / 32, rows · bits / 2) with 4 or 8 "
            "bits, (blocks, rows) and (cols / 32, 2 · rows), with a multiple of 64 rows"
        )
    shape = rows, 2 * COLS * codes.shape[0]
    blocks = fit_blocks(scale.shape[0], shape[1])
    elements, columns = (
        Grid(entry, shape[1] // 2, 1, key=key, tiles=tiles)
        for entry, key, tiles in ((codes, "codes", SPARSE[bits]), (meta, "meta", META))
    )
    decoder = Decoder(
        codes,
        shape[1],
        scale=replace(blocks.grid(scale), tiles=SPARSE_SCALE_TILES[blocks.n <= 2]),
        group=blocks.group,
        read=partial(_read_sparse, elements, columns, 1 << bits - 1),
    )
    return _make_weight(parts, shape, bits, blocks, decoder)


def _make_weight(parts: Parts, shape: tuple[int, int], bits: int, blocks: ColumnBlocks, decoder: Decoder) -> Weight:
    return parts.weight(
        shape,
        decoder,
        block_size=blocks.edges,
        levels=uniform(bits),
        scale=parts["scale"],
        evidence=(f"{bits}-bit codes {parts.codes}, scales {parts['scale']}",),
        warnings=blocks.warnings,
    )


def _read_sparse(codes: Grid, meta: Grid, middle: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read code - ``middle`` where there is a code, else 0, of a chunk: (r, c) float32.

    ``codes`` has the codes of kept columns, two of every four, ``meta`` the column of each within its four.
    """
    left, right = chunk.col // 4, -(-chunk.stop_col // 4)
    stored_chunk = chunk._replace(col=2 * left, stop_col=2 * right)
    values, columns = codes(stored_chunk, workspace).float() - middle, meta(stored_chunk, workspace).long()
    columns += torch.arange(right - left, device=columns.device).repeat_interleave(2) * 4
    dense = values.new_zeros(len(values), 4 * (right - left)).scatter_(1, columns, values)
    return dense[:, chunk.col - 4 * left : chunk.stop_col - 4 * left]


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
