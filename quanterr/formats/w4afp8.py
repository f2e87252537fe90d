"""W4AFP8, DeepSeek's experts in SGLang: signed integers of 4 bits, a scale per 128 columns.

    weight              i8     (rows, cols / 2), or (experts, rows, cols / 2): the first code in the low nibble
    weight_scale_inv    f32    (rows, cols / 128), or (experts, rows, cols / 128)

    weight[r, c] = float32(code[r, c]) * weight_scale_inv[r, c // 128]    rounded

FP8 and INT8 in blocks have the same names: quant_method w4afp8 in config.json, or the original's shape, decides.
SGLang rounds scales to bfloat16. All other layers are FP8 in blocks.

Reference: sgl-project/sglang 0.5.23 layers/quantization/w4afp8.py, sgl-kernel/tests/test_cutlass_w4a8_moe_mm.py;
NVIDIA/TensorRT-LLM@2376c67c examples/quantization/quantize_mixed_precision_moe.py.
"""

from __future__ import annotations

from quanterr.formats.base import (
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.padding import check_width
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT4

METHOD = "w4afp8"
GROUP = 128
NEEDS = {"codes": PartSpec(("{weight}",), INT8), "scale": PartSpec(("{weight}_scale_inv",), FLOATS)}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if config.json declares W4AFP8, or the original has two columns for each byte."""
    codes, scale = parts.codes, parts["scale"]
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
    declared = parts.hints.config.get("quant_method") == METHOD
    if not declared and parts.hints.shape != shape:
        return None
    if len(shape) not in (2, 3) or shape[-1] % GROUP:
        raise FormatMismatch(f"{codes} should hold a multiple of {GROUP} columns, two in each byte, in rows")
    expected = (*shape[:-1], shape[-1] // GROUP)
    if scale.shape != expected:
        raise FormatMismatch(
            f"{scale} should be {list(expected)}: a number per {GROUP} columns of {codes}, whose bytes hold two codes"
        )
    check_width(parts, shape)
    decoder = Decoder(
        codes,
        shape[-1],
        levels=element_types.INT4,
        scale=Grid(scale, expected[-1], GROUP),
        group=GROUP,
    )
    return parts.weight(
        shape,
        decoder,
        block_size=(1, GROUP),
        levels=INT4.centred_levels,
        scale=scale,
        evidence=(
            f"two codes in each byte of {codes}, scale {scale}, {'declared' if declared else 'as the original'}",
        ),
    )


FORMATS = (
    Format("w4afp8", NEEDS, fit, summary="W4AFP8 (SGLang): 4-bit integers, a scale per 128 columns", usual_db=(17, 19)),
)
