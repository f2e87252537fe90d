"""FP8 codes with a scale: one for the tensor, one a row, or one a block.

    weight    f8_e4m3 or f8_e5m2    (rows, cols), or (experts, rows, cols)
    scale     f32, bf16, f16; f8_e8m0 or u8 (an E8M0 exponent) beside weight_scale_inv and .scale

    weight[r, c] = float32(code[r, c]) * float32(scale of r, c)                        one rounding

The scale multiplies under each of its names: weight_scale (compressed-tensors, vLLM, ModelOpt, FBGEMM,
ComfyUI), scale_weight (old ComfyUI files), weight_scale_inv (DeepSeek, transformers: the inverse of the
quantization factor), .scale (DeepSeek-V4), qscale_weight (Mistral), X_scale and X_scale_inv for a stacked
X without .weight. Which element has which scale: quanterr/formats/scaled.py. Runtimes round weight and
scale to their compute dtype first; that is not part of the format and not done here.

Reference: comfyanonymous/ComfyUI comfy/ops.py, Comfy-Org/comfy-kitchen tensor/fp8.py; deepseek-ai/DeepSeek-V3
inference/kernel.py; vllm-project/compressed-tensors compressors/naive_quantized/base.py.
"""

from functools import partial

from quanterr.chunks import Chunk
from quanterr.errors import Misfit
from quanterr.formats import bits
from quanterr.formats.base import Format, Part, Parts, Values, Weight
from quanterr.formats.comfy import check_labels
from quanterr.formats.scaled import Grid, block_of, fit_grid, hints
from quanterr.tensors import Workspace

CODES = frozenset({"F8_E4M3", "F8_E5M2"})
FLOATS = frozenset({"F32", "BF16", "F16"})
EXPONENTS = frozenset({"F8_E8M0", "U8"})
NAMES = (
    "{weight}_scale",
    "{weight}_scale_inv",
    "{module}.scale_weight",
    "{module}.scale",
    "{module}.qscale_weight",
    "{weight}.scale",
)
NEEDS = {"codes": Part(("{weight}",), CODES), "scale": Part(NAMES, FLOATS | EXPONENTS)}


def fit(parts: Parts, granularity: str) -> Weight | None:
    """The weight, if its scale has that granularity."""
    codes, scale = parts["codes"], parts["scale"]
    if scale.dtype in EXPONENTS and scale.name.endswith("weight_scale"):
        raise Misfit(f"scale {scale} holds exponents (MXFP8), a layout this version does not read")
    comfy_format, doubts = check_labels(parts, codes.dtype)
    grid = fit_grid(scale, codes.shape, hints(parts))
    if grid.granularity != granularity:
        return None
    return Weight(
        parts.name,
        f"fp8_{granularity}",
        codes.shape,
        parts.entries,
        partial(dequantize, parts, grid),
        block_size=block_of(grid),
        scale=scale,
        evidence=(f"codes {codes.dtype}, scale {scale}: {grid.reason}",),
        doubts=(*doubts, grid.doubt) if grid.doubt else doubts,
        comfy_format=comfy_format,
    )


def dequantize(parts: Parts, grid: Grid, chunk: Chunk, workspace: Workspace) -> Values:
    """float32(code) · float32(scale), (r, c)."""
    return grid.multiply(read_codes(parts, chunk, workspace), chunk, workspace)


def read_codes(parts: Parts, chunk: Chunk, workspace: Workspace) -> bits.Codes:
    """The codes' own values."""
    entry = parts["codes"]
    codes = workspace.read("codes", entry, chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    return (bits.e4m3 if entry.dtype == "F8_E4M3" else bits.e5m2)(codes, workspace)


FORMATS = tuple(
    Format(
        name=f"fp8_{granularity}",
        summary=f"FP8 codes, one scale {of}",
        needs=NEEDS,
        fit=partial(fit, granularity=granularity),
        specification=__doc__ or "",
        usual_db=usual_db,
    )
    for granularity, of, usual_db in (
        ("tensor", "for the tensor", (31, 32)),
        ("row", "a row", (31, 33)),
        ("block", "a block", (31, 33)),
    )
)
