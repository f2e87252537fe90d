"""NVFP4 of compressed-tensors (nvfp4-pack-quantized): E2M1 codes, an E4M3 scale per 16 columns, and a divisor.

    weight_packed          u8         (rows, cols / 2) or (experts, rows, cols / 2), two codes per byte, the first in
                                      the low bits
    weight_scale           f8_e4m3    (rows, cols / 16)
    weight_global_scale    f32        one, or one per expert: 448 · 6 / amax, which divides weight_scale

    scale = float32(weight_scale[r, c // 16]) / weight_global_scale                   rounded
    weight[r, c] = e2m1(code[r, c]) * scale                                           rounded

ModelOpt's weight_scale_2 is the inverse of weight_global_scale and multiplies: see nvfp4.

nvfp4-e5m3-pack-quantized (AutoRound's NVFP4_E5M3) has no divisor, and weight_scale, u8, holds E5M3 numbers: without a
sign, bias 15, 255 is NaN.

Reference: vllm-project/compressed-tensors@ac8e2ba8 compressors/nvfp4/base.py; intel/auto-round (as of 0.16.1)
auto_round/data_type/nvfp.py e5m3_to_float_tensor, auto_round/export/export_to_llmcompressor/config.py.
"""

from quanterr.formats.base import Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.element_types import E4M3
from quanterr.formats.shared.microscaling import (
    check_global_scale,
    make_e5m3_weight,
    multiply_scales,
    read_microscaled,
)
from quanterr.formats.shared.padding import fit_unpadded
from quanterr.formats.shared.swizzled_scales import fit_block_scales
from quanterr.kernel.levels import E2M1

BLOCK = 16
NEEDS = {
    "codes": PartSpec(("{weight}_packed",), frozenset({"U8"})),
    "scale": PartSpec(("{weight}_scale",), frozenset({"F8_E4M3"})),
    "global_scale": PartSpec(("{weight}_global_scale",), frozenset({"F32"})),
}


def fit(parts: Parts) -> Weight:
    """Return the weight if there is a scale per 16 columns."""
    codes, scale, global_scale = parts.codes, parts["scale"], parts["global_scale"]
    if len(codes.shape) not in (2, 3):
        raise FormatMismatch(f"NVFP4 codes are (rows, cols / 2) or (experts, rows, cols / 2), not {codes}")
    stored = (*codes.shape[:-1], 2 * codes.shape[-1])
    experts = codes.shape[0] if len(codes.shape) == 3 else 1
    layouts = fit_block_scales(scale, stored[-2], -(-stored[-1] // BLOCK), experts, BLOCK, E4M3)
    if not layouts or layouts[0].tiles:
        expected = [*stored[:-1], -(-stored[-1] // BLOCK)]
        raise FormatMismatch(f"its scale {scale} does not fit {codes}: expected one per 16 columns, {expected}")
    check_global_scale(global_scale, experts)
    padded = fit_unpadded(parts, stored, BLOCK)
    scales = multiply_scales(layouts[0], global_scale, padded.stored_rows, "div")
    return parts.weight(
        padded.shape,
        read_microscaled(codes, "e2m1", padded, scales),
        code_bits=4,
        levels=E2M1.centred_levels,
        block_size=(1, BLOCK),
        evidence=(f"codes {codes}, scales {scale}, divided by {global_scale}",),
    )


def fit_e5m3(parts: Parts) -> Weight | None:
    """Return the weight if there is a scale per 16 columns; MXFP4 has one per 32."""
    codes, scale = parts.codes, parts["scale"]
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else (0,)
    if len(shape) not in (2, 3) or scale.shape != (*shape[:-1], -(-shape[-1] // BLOCK)):
        return None
    return make_e5m3_weight(parts, shape, BLOCK)


FORMATS = (
    Format("ct_nvfp4", NEEDS, fit, usual_db=(19, 21)),
    Format(
        "ct_nvfp4_e5m3",
        {"codes": NEEDS["codes"], "scale": PartSpec(("{weight}_scale",), frozenset({"U8"}))},
        fit_e5m3,
        summary="NVFP4 of AutoRound (nvfp4-e5m3-pack-quantized): E2M1 codes, an E5M3 scale per 16 columns",
        usual_db=(19, 21),
    ),
)
