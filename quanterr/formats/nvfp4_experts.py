"""NVFP4 of stacked experts whose rows are inputs: a byte holds two codes of one column, and 16 rows share a scale.

    X                     u8         (experts, rows / 2, cols), the first row in the low bits
    X_weight_scale        f8_e4m3    (experts, rows / 16, cols)
    X_weight_scale_2      f32        one, or one per expert

    scale = float32(weight_scale[e, r // 16, c]) * weight_scale_2                     rounded
    weight[e, r, c] = e2m1(code[e, r, c]) * scale                                     rounded

ModelOpt writes this for models that keep their experts as (experts, in, out), such as Llama 4 and gpt-oss: it
transposes them, quantizes along the inputs and transposes codes and scales back.

Reference: NVIDIA/Model-Optimizer@a2fbac7b modelopt/torch/export/unified_export_hf.py and quant_utils.py
maybe_transpose_expert_weight_dimensions.
"""

from __future__ import annotations

from functools import partial

from quanterr.formats.base import Dequantize, Format, Parts, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.microscaling import NVFP4_PARTS, check_global_scale, multiply_scales
from quanterr.formats.shared.padding import fit_unpadded
from quanterr.formats.shared.row_pairs import read_pairs_of_rows
from quanterr.kernel.grid import Grid
from quanterr.kernel.interpreter import interpret
from quanterr.kernel.levels import E2M1

BLOCK = 16


def fit(parts: Parts) -> Weight | None:
    """Return the weight if each block of 16 rows has a scale."""
    codes, scale, global_scale = parts.codes, parts["scale"], parts["global_scale"]
    if codes.dtype != "U8" or len(codes.shape) != 3 or parts.get("pre_quant_scale"):
        return None
    experts, pairs, cols = codes.shape
    if pairs % (BLOCK // 2) or scale.shape != (experts, 2 * pairs // BLOCK, cols):
        return None
    check_global_scale(global_scale, experts)
    padded = fit_unpadded(parts, (experts, 2 * pairs, cols), 1)
    return parts.weight(
        padded.shape,
        _read(parts, padded.rows, cols),
        code_bits=4,
        levels=E2M1.centred_levels,
        block_size=(BLOCK, 1),
        evidence=(f"codes {codes}, scales {scale}: blocks of 16 rows",),
    )


def _read(parts: Parts, rows: int, cols: int) -> Dequantize:
    """Return the decoder of the weight: e2m1(code) · (scale · global scale); experts have ``rows`` rows."""
    blocks = Grid(parts["scale"], cols, 1, BLOCK, levels=element_types.E4M3)
    scale = multiply_scales(blocks, parts["global_scale"], rows)
    # The kernel could read the decoder, too; its sums would differ from torch's in the last digits.
    return partial(interpret, read_pairs_of_rows(parts.codes, scale, 1, levels=element_types.E2M1))


FORMATS = (Format("nvfp4_experts", NVFP4_PARTS, fit, usual_db=(19, 21)),)
