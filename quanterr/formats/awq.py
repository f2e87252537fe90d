"""AWQ: integers of mostly 4 bits, a scale and a zero point for each block of columns.

    gemm         qweight    i32               (cols, rows · b / 32), codes of a column packed: interleaved for
                                              4 bits, dense for the others; see shared/bit_packing.py
                 qzeros     i32               (blocks, rows · b / 32), packed alike; where it is missing all
                                              zero points are 2^(b-1)
                 scales     f16, bf16, f32    (blocks, rows)
    gemv         qweight    i32               (rows, cols / 8), codes of a row packed, dense
                 qzeros     i32               (rows, w), packed alike
                 scales     f16, bf16, f32    (rows, 8 · w); what is over the number of blocks is not used
    gemv_fast    qweight    i16               (rows / 4, cols), four rows and 64 columns shuffled; see below
                 qzeros     f16, bf16, f32    (8 · w, rows), minus scale times zero point; llm-awq: scaled_zeros
                 scales     f16, bf16, f32    (8 · w, rows)

    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]    exact for 16-bit scales
    gemv_fast:     code[r, c] * scale[r, block of c] + qzeros[block of c, r]          the sum is rounded

A block is c // group_size. w is the number of blocks divided by 8, rounded up to a multiple of 4 for
blocks of 32 columns, of 2 for 64, of 1 for more.

gemv_fast: nibble i of element (a, 64 b + c) is number s = 4 c + i of 256. It is row 4 a + s // 64 and column
64 b + 32 (s % 64 // 32) + 8 (s % 4) + 2 (s % 32 // 8) + s % 8 // 4.

What is gemm, what gemv, and what GPTQ is inferred from the shapes.

Reference: casper-hansen/AutoAWQ@88e4c76b awq/modules/linear/gemm.py, gemv.py, gemv_fast.py,
awq/utils/packing_utils.py; ModelCloud/GPTQModel@f4c327a1 gptqmodel/quantization/awq/utils/packing_utils.py for other
bits; mit-han-lab/llm-awq awq/quantize/qmodule.py.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    Chunk,
    Decoder,
    Dequantize,
    Element,
    Format,
    FormatMismatch,
    Native,
    Order,
    Part,
    Parts,
    Values,
    Weight,
    Workspace,
)
from quanterr.formats.shared import bit_stream
from quanterr.formats.shared.bit_packing import Packing, cropped, unpack_columns, unpack_transposed
from quanterr.formats.shared.column_groups import Blocks, fit_blocks
from quanterr.formats.shared.gptq_awq_common import (
    FLOATS,
    SCALE,
    WORDS,
    configured_group_size,
    contradictions,
    gemm_bits,
    is_gemv,
    said_bits,
    turned_scale,
)
from quanterr.tensors.levels import uniform
from quanterr.tensors.workspace import OUTPUT

SIZES = (128, 64, 32)  # of blocks, the likeliest first
NIBBLES = Packing("dense", 4)
ROWS, COLS = 4, 64  # that gemv_fast shuffles

CODES = Part(("{module}.qweight",), WORDS)
GEMM = {"codes": CODES, "scale": SCALE, "zero_point": Part(("{module}.qzeros",), WORDS, optional=True)}
GEMV = {"codes": CODES, "scale": SCALE, "zero_point": Part(("{module}.qzeros",), WORDS)}
FAST = {
    "codes": Part(("{module}.qweight",), frozenset({"I16"})),
    "scale": SCALE,
    "offset": Part(("{module}.qzeros", "{module}.scaled_zeros"), FLOATS),
}


def fit_gemm(parts: Parts) -> Weight | None:
    """The weight, if shapes are those of gemm."""
    fitting, zero_point = gemm_bits(parts.codes, parts["scale"]), parts.get("zero_point")
    bits = said_bits(parts) if said_bits(parts) in fitting else next(iter(fitting), None)
    if bits is None:
        return None
    (cols, width), (n_blocks, rows) = parts.codes.shape, parts["scale"].shape
    if zero_point is not None and zero_point.shape != (n_blocks, width):
        raise FormatMismatch(f"{zero_point} should be as wide as {parts.codes} and as high as {parts['scale']}")
    packing = Packing("interleaved" if bits == 4 else "dense", bits)
    blocks = fit_blocks(n_blocks, cols, configured_group_size(parts))
    return _weight(parts, (rows, cols), blocks, packing, _native_gemm(parts, cols, blocks, packing))


def fit_gemv(parts: Parts) -> Weight | None:
    """The weight, if shapes are those of gemv; other sizes of blocks that fit as alternatives."""
    if not is_gemv(parts):
        return None
    (rows, width), stored = parts.codes.shape, parts["scale"].shape[1]
    cols = 8 * width
    alternatives = [
        _weight(parts, (rows, cols), blocks, NIBBLES, _native_gemv(parts, cols, blocks))
        for blocks in _padded_blocks(parts, cols, stored)
    ]
    return alternatives[0].or_else(alternatives[1:])


def fit_fast(parts: Parts) -> Weight:
    """The weight of codes in 16 bits; other sizes of blocks that fit as alternatives."""
    codes, scale, offset = parts.codes, parts["scale"], parts["offset"]
    if len(codes.shape) != 2 or scale.shape[1:] != (ROWS * codes.shape[0],) or scale.shape != offset.shape:
        raise FormatMismatch(f"{scale} and {offset} should have {ROWS} columns for each row of {codes}")
    if codes.shape[1] % COLS:
        raise FormatMismatch(f"{codes} should have a multiple of {COLS} columns")
    rows, cols = ROWS * codes.shape[0], codes.shape[1]
    alternatives = [
        _weight(parts, (rows, cols), blocks, NIBBLES, partial(dequantize_fast, parts, blocks))
        for blocks in _padded_blocks(parts, cols, scale.shape[0])
    ]
    return alternatives[0].or_else(alternatives[1:])


def _padded_blocks(parts: Parts, cols: int, stored: int) -> list[Blocks]:
    """The blocks that fit in so many stored ones, the likeliest first.

    Raises:
        FormatMismatch: none fit.
    """
    declared = configured_group_size(parts) or 0
    sizes = dict.fromkeys((declared if declared > 0 else cols if declared else 0, *SIZES, cols))
    fitting = [size for size in sizes if size and stored == _stored_blocks(cols, size)]
    if not fitting:
        raise FormatMismatch(f"{parts['scale']} fits no size of blocks in {cols} columns")
    return [Blocks(-(-cols // size), size) for size in fitting]


def _stored_blocks(cols: int, size: int) -> int:
    """Blocks of that size, and the unused ones beside them."""
    multiple = {32: 4, 64: 2}.get(size, 1)
    width = -(-(cols // size) // 8)
    return 8 * -(-width // multiple) * multiple


def _weight(parts: Parts, shape: tuple[int, int], blocks: Blocks, packing: Packing, dequantize: Dequantize) -> Weight:
    stored = parts["scale"]
    return parts.weight(
        shape,
        dequantize,
        block_size=blocks.edges,
        code_bits=packing.bits,
        uniform_bits=packing.bits,
        levels=uniform(packing.bits),
        scale=stored if stored.n == shape[0] * blocks.n else None,
        evidence=(f"{packing.bits}-bit codes {parts.codes}, scales {stored}, blocks of {blocks.size} columns",),
        warnings=(*blocks.warnings, *contradictions(parts, packing.bits, blocks.n, shape[1])),
    )


def dequantize_gemm(parts: Parts, blocks: Blocks, packing: Packing, chunk: Chunk, workspace: Workspace) -> Values:
    """(code - zero point) · scale, (r, c)."""
    rows = chunk.row, chunk.stop_row
    stored = workspace.whole("columns", parts.codes)[chunk.col : chunk.stop_col]
    codes = unpack_transposed(stored, packing, rows, workspace, OUTPUT)
    zero_point: Tensor | float = 1 << packing.bits - 1
    if entry := parts.get("zero_point"):
        zero_point = _zero_points(entry, packing, chunk, workspace)
    return Values(
        blocks.dequantize(codes, zero_point, turned_scale(parts["scale"], chunk, workspace), chunk, workspace)
    )


def _zero_points(entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Of the rows of a chunk, stored as (blocks, rows): (r, blocks) float32."""
    rows = chunk.row, chunk.stop_row
    return unpack_transposed(workspace.whole("zeros", entry), packing, rows, workspace, "zero_points")


def _native_gemm(parts: Parts, cols: int, blocks: Blocks, packing: Packing) -> Dequantize:
    """:func:`dequantize_gemm`, with the same as data where codes have 4 bits."""
    plain, zero_point = partial(dequantize_gemm, parts, blocks, packing), parts.get("zero_point")
    if packing.name != "interleaved":
        return plain
    table = bit_stream.byte_table(8, 0 if zero_point else 1 << packing.bits - 1)  # of codes that are in order
    decoder = Decoder(
        parts.codes,
        cols,
        Element.TABLE,
        table,
        scale=blocks.within(partial(turned_scale, parts["scale"])),
        zero=blocks.within(partial(_zero_points, zero_point, packing)) if zero_point else None,
        group=blocks.group,
        order=Order.AWQ_WORDS,
    )
    return Native(plain, decoder)


def dequantize_gemv(parts: Parts, blocks: Blocks, chunk: Chunk, workspace: Workspace) -> Values:
    """(code - zero point) · scale, (r, c)."""
    r, width = chunk.shape[0], parts.codes.shape[1]
    left, right = chunk.col // 8, -(-chunk.stop_col // 8)
    containers = workspace.read("containers", parts.codes, chunk.row * width + left, (r, right - left))
    codes = unpack_columns(containers, NIBBLES, workspace)
    codes = cropped(codes, chunk.col - 8 * left, chunk.stop_col - 8 * left, workspace)
    zero_points = _zero_points_of_rows(parts["zero_point"], chunk, workspace)
    scale = _scales_of_rows(parts["scale"], chunk, workspace)
    return Values(blocks.dequantize(codes, zero_points, scale, chunk, workspace))


def _zero_points_of_rows(entry: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Of the rows of a chunk, stored as (rows, w): (r, 8 · w) float32."""
    r, w = chunk.shape[0], entry.shape[1]
    containers = workspace.read("zero_containers", entry, chunk.row * w, (r, w))
    return unpack_columns(containers, NIBBLES, workspace, "zero_points")


def _scales_of_rows(entry: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Of the rows of a chunk, stored as (rows, 8 · w): the same in float32."""
    r, n = chunk.shape[0], entry.shape[1]
    return workspace.read("scale", entry, chunk.row * n, (r, n)).float()


def _native_gemv(parts: Parts, cols: int, blocks: Blocks) -> Dequantize:
    """:func:`dequantize_gemv`, with the same as data."""
    decoder = Decoder(
        parts.codes,
        cols,
        Element.TABLE,
        bit_stream.byte_table(NIBBLES.bits),
        scale=blocks.within(partial(_scales_of_rows, parts["scale"])),
        zero=blocks.within(partial(_zero_points_of_rows, parts["zero_point"])),
        group=blocks.group,
    )
    return Native(partial(dequantize_gemv, parts, blocks), decoder)


def dequantize_fast(parts: Parts, blocks: Blocks, chunk: Chunk, workspace: Workspace) -> Values:
    """code · scale, rounded, plus the offset, rounded: (r, c)."""
    values = _shuffled(parts.codes, chunk, workspace)
    scale = turned_scale(parts["scale"], chunk, workspace)
    offset = turned_scale(parts["offset"], chunk, workspace, "offsets")
    blocks.change(Tensor.mul_, values, scale, chunk, workspace)
    return Values(blocks.change(Tensor.add_, values, offset, chunk, workspace))


def _shuffled(entry: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Codes of gemv_fast, (r, c) float32, from whole rows of four and tiles of 64 columns."""
    top, bottom = chunk.row // ROWS, -(-chunk.stop_row // ROWS)
    left, right = 0, entry.shape[1]
    if bottom - top == 1:
        left, right = chunk.col // COLS * COLS, -(-chunk.stop_col // COLS) * COLS
    stored = workspace.read("containers", entry, top * entry.shape[1] + left, (bottom - top, right - left))
    tiles = (right - left) // COLS
    codes = unpack_columns(stored, NIBBLES, workspace, "shuffled").view(bottom - top, tiles, ROWS, 2, 4, 2, 4)
    shape = (bottom - top, ROWS, tiles, 2, 4, 4, 2)
    ordered = workspace.buffer("ordered", shape, torch.float32).copy_(codes.permute(0, 2, 1, 3, 6, 4, 5))
    rows = ordered.view(-1, right - left)[chunk.row - top * ROWS : chunk.stop_row - top * ROWS]
    return cropped(rows, chunk.col - left, chunk.stop_col - left, workspace)


def _format(name: str, summary: str, needs: Mapping[str, Part], fit: Callable[[Parts], Weight | None]) -> Format:
    version = name.removeprefix("awq_")
    return Format(name, needs, fit, summary=summary, usual_db=(18, 22), declared=("version", version))


FORMATS = (
    _format("awq_gemm", "integers of mostly 4 bits, transposed; a scale and a zero point per block", GEMM, fit_gemm),
    _format("awq_gemv", "integers of 4 bits; a scale and a zero point for each block of columns", GEMV, fit_gemv),
    _format("awq_gemv_fast", "integers of 4 bits, shuffled; a scale and an offset per block", FAST, fit_fast),
)
