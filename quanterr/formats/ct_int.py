"""compressed-tensors int-quantized with zero points or in act-order.

    weight               i8                (rows, cols), or (experts, rows, cols)
    weight_scale         f32, bf16, f16    (rows, blocks), or (experts, rows, blocks), or one
    weight_zero_point    i8                shaped as the scale; optional
    weight_g_idx         i32               (cols,), optional: shared/column_groups.py

    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]    one rounding

Codes of fewer bits also take a byte each (naive-quantized). Without zero points and order: int8_scaled.py.

Reference: vllm-project/compressed-tensors@ac8e2ba8 compressors/naive_quantized/base.py,
quantization/lifecycle/forward.py.
"""

from quanterr.formats.base import Decoder, Format, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.ct_config import read_setting
from quanterr.formats.shared.ct_row_groups import fit_row_blocks
from quanterr.kernel.levels import signed_bytes

NEEDS = {
    "codes": PartSpec(("{weight}",), INT8),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
    "zero_point": PartSpec(("{weight}_zero_point",), INT8, optional=True),
    "order": PartSpec(("{weight}_g_idx",), frozenset({"I32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if zero points or an order of columns are stored."""
    if parts.hints.labels or not (parts.get("zero_point") or parts.get("order")):
        return None
    shape = parts.codes.shape
    blocks, bits = fit_row_blocks(parts, shape), read_setting(parts, "num_bits") or 8
    return parts.weight(
        shape,
        _read(parts, blocks),
        block_size=blocks.edges,
        code_bits=8,
        levels=signed_bytes(bits),
        scale=parts["scale"],
        evidence=(f"codes {parts.codes}, scale {parts['scale']}",),
        warnings=blocks.warnings,
    )


def _read(parts: Parts, blocks: ColumnBlocks) -> Decoder:
    """Return the decoder of the weight: (code - zero point) · scale."""
    zero_point = parts.get("zero_point")
    return element_types.read_one_by_one(
        parts,
        blocks.grid(parts["scale"]),
        blocks.group,
        blocks.grid(zero_point, "zero_point") if zero_point else None,
        columns=blocks.order,
    )


FORMATS = (Format("ct_int", NEEDS, fit, usual_db=(30, 42)),)
