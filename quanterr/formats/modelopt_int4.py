"""ModelOpt INT4 (W4A16_AWQ, W4A8_AWQ): signed integers of 4 bits, two rows in a byte.

    weight             u8       (rows / 2, cols), or (experts, rows / 2, cols): the even row in the low nibble
    weight_scale       f32      (rows, blocks), or (experts, rows, blocks)
    pre_quant_scale    floating (cols,), if the layer multiplies its input by it; optional
    weight_scale_2     f32      one, by which a runtime scales the weight to FP8; not read, optional

    weight[r, c] = float32(code[r, c]) * weight_scale[r, block of c]                    rounded
                   * pre_quant_scale[c], if stored                                      rounded

Reference: NVIDIA/Model-Optimizer@a2fbac7b modelopt/torch/export/quant_utils.py pack_int4_in_uint8.
"""

from functools import cache, partial
from math import nan, prod

import torch
from torch import Tensor

from quanterr.formats.base import (
    Chunk,
    Decoder,
    ElementType,
    Format,
    Native,
    Order,
    Parts,
    PartSpec,
    Values,
    Weight,
    Workspace,
)
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.flat_blocks import read_of_rows
from quanterr.formats.shared.pre_quant_scale import PART, apply_pre_quant_scale
from quanterr.kernel.decoder import SharedBytes, StoredScales
from quanterr.kernel.levels import INT4

FLOATS = frozenset({"F32", "BF16", "F16"})
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"U8"})),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
    "pre_quant_scale": PART,
    "runtime_scale": PartSpec(("{weight}_scale_2",), frozenset({"F32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if there are twice as many rows of scales as of codes."""
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) not in (2, 3) or len(scale.shape) != len(codes.shape):
        return None
    shape = (*codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1])
    if scale.shape[:-1] != shape[:-1]:
        return None
    size = parts.hints.config.get("group_size")
    blocks = fit_blocks(scale.shape[-1], shape[-1], size if isinstance(size, int) else None)
    weight = parts.weight(
        shape,
        _attach_decoder(parts, blocks, shape),
        block_size=blocks.edges,
        code_bits=4,
        uniform_bits=4,
        levels=INT4,
        scale=scale,
        evidence=(f"two rows of 4-bit codes in each of {codes}, scale {scale}",),
        warnings=blocks.warnings,
    )
    return apply_pre_quant_scale(parts, weight)


def dequantize(parts: Parts, blocks: ColumnBlocks, chunk: Chunk, workspace: Workspace) -> Values:
    """Return code · scale, (r, c)."""
    cols = parts.codes.shape[-1]
    top, bottom, c = chunk.row // 2, -(-chunk.stop_row // 2), chunk.shape[1]
    rows = bottom - top
    stored = workspace.read("codes", parts.codes, top * cols + chunk.col, (rows, c if rows == 1 else cols))
    nibbles = workspace.buffer("nibbles", (rows, c), torch.int8)
    values = workspace.output((rows, 2, c))
    signed = stored.view(torch.int8)
    values[:, 0].copy_(torch.bitwise_left_shift(signed, 4, out=nibbles).bitwise_right_shift_(4))
    values[:, 1].copy_(torch.bitwise_right_shift(signed, 4, out=nibbles))
    codes = values.view(2 * rows, c)[chunk.row - 2 * top : chunk.stop_row - 2 * top]
    scale = read_of_rows("scale", parts["scale"], blocks.n, chunk, workspace)
    return Values(blocks.dequantize(codes, 0.0, scale, chunk, workspace))


def _attach_decoder(parts: Parts, blocks: ColumnBlocks, shape: tuple[int, ...]) -> Native:
    """Return :func:`dequantize` with a :class:`Decoder`."""
    scale = parts["scale"]
    decoder = Decoder(
        parts.codes,
        shape[-1],
        ElementType.TABLE,
        _make_table(),
        blocks.restrict(partial(read_of_rows, "scale", scale, blocks.n)),
        group=blocks.group,
        order=Order.SHARED_BYTES,
        stored=StoredScales.fit(scale, prod(shape[:-1]), blocks.n),
        shared=SharedBytes(1, (0, 4), 4),
    )
    return Native(partial(dequantize, parts, blocks), decoder)


@cache
def _make_table() -> Tensor:
    """Return the value of each code, alone in a byte, (256, 1) float32."""
    return torch.tensor([*range(8), *range(-8, 0), *[nan] * 240])[:, None]


FORMATS = (Format("modelopt_int4", NEEDS, fit, usual_db=(17, 22)),)
