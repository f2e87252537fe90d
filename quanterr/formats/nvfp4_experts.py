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

from functools import cache, partial

from quanterr.formats.base import Chunk, Format, Parts, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.microscaling import NVFP4_PARTS, check_global_scale, read_global_scale
from quanterr.formats.shared.padding import fit_unpadded
from quanterr.kernel.levels import E2M1
from quanterr.lazy_torch import Tensor, torch

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
        partial(dequantize, parts, padded.rows, cols),
        code_bits=4,
        levels=E2M1.scaled,
        block_size=(BLOCK, 1),
        evidence=(f"codes {codes}, scales {scale}: blocks of 16 rows",),
    )


def dequantize(parts: Parts, rows: int, cols: int, chunk: Chunk, workspace: Workspace) -> Values:
    """Return e2m1(code) · (scale · global scale), (r, c); experts have ``rows`` rows, a multiple of 16."""
    top, bottom = chunk.row // 2, -(-chunk.stop_row // 2)
    stored = workspace.read_bytes("codes", parts.codes, top * cols, (bottom - top, cols))
    indices = workspace.buffer("indices", (bottom - top, 2, cols), torch.int32)
    indices[:, 0].copy_(stored)
    torch.bitwise_right_shift(indices[:, 0], 4, out=indices[:, 1])
    indices[:, 0].bitwise_and_(15)
    values = element_types.look_up(indices.view(-1, cols), _make_table(workspace.device))
    values = values[chunk.row % 2 : chunk.row % 2 + chunk.shape[0]]
    first, last = chunk.row // BLOCK, -(-chunk.stop_row // BLOCK)
    scale = element_types.decode_e4m3_scales(
        workspace.read("scale", parts["scale"], first * cols, (last - first, cols))
    )
    blocks = chunk._replace(row=first, stop_row=last)
    scale.mul_(read_global_scale(parts["global_scale"], rows // BLOCK, blocks, workspace))
    of_row = torch.arange(chunk.row, chunk.stop_row, device=workspace.device) // BLOCK - first
    of_element = workspace.buffer("of_element", (chunk.shape[0], cols), torch.float32)
    values.mul_(torch.index_select(scale, 0, of_row, out=of_element))
    if chunk.shape[1] == cols:
        return Values(values)
    cropped = workspace.buffer("cropped", chunk.shape, torch.float32)
    return Values(cropped.copy_(values[:, chunk.col : chunk.stop_col]))


@cache
def _make_table(device: torch.device) -> Tensor:
    """Return the value of each code, (16, 1) float32."""
    return torch.tensor(element_types.E2M1, device=device).unsqueeze(1)


FORMATS = (Format("nvfp4_experts", NVFP4_PARTS, fit, usual_db=(19, 21)),)
