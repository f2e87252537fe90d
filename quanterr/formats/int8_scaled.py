"""INT8 codes with a scale: one for the tensor, one a row, or one a block.

    weight    i8                (rows, cols), or (experts, rows, cols)
    scale     f32, bf16, f16

    weight[r, c] = float32(code[r, c]) * float32(scale of r, c)                        one rounding

The scale is called weight_scale, scale_weight (old convert_to_quant files, which carry no label at all)
or weight_scale_inv. Which element has which scale: quanterr/formats/scaled.py.

Reference: comfyanonymous/ComfyUI comfy/ops.py, Comfy-Org/comfy-kitchen tensor/int8.py;
silveroxides/convert_to_quant comfy/quant_ops.py; vllm-project/compressed-tensors
compressors/naive_quantized/base.py.
"""

from functools import partial

from quanterr.chunks import Chunk
from quanterr.formats import bits
from quanterr.formats.base import Format, Part, Parts, Values, Weight
from quanterr.formats.comfy import check_labels
from quanterr.formats.scaled import Grid, block_of, fit_grid, hints
from quanterr.tensors import Workspace

CODES = frozenset({"I8"})
FLOATS = frozenset({"F32", "BF16", "F16"})
NAMES = (
    "{weight}_scale",
    "{weight}_scale_inv",
    "{module}.scale_weight",
    "{module}.scale",
    "{weight}.scale",
)
BITS = 8
NEEDS = {"codes": Part(("{weight}",), CODES), "scale": Part(NAMES, FLOATS)}


def fit(parts: Parts, granularity: str) -> Weight | None:
    """The weight, if its scale has that granularity."""
    codes, scale = parts["codes"], parts["scale"]
    comfy_format, doubts = check_labels(parts, codes.dtype)
    grid = fit_grid(scale, codes.shape, hints(parts))
    if grid.granularity != granularity:
        return None
    return Weight(
        parts.name,
        f"int8_{granularity}",
        codes.shape,
        parts.entries,
        partial(dequantize, parts, grid),
        block_size=block_of(grid),
        uniform_bits=BITS,
        scale=scale,
        evidence=(f"codes {codes.dtype}, scale {scale}: {grid.reason}",),
        doubts=(*doubts, grid.doubt) if grid.doubt else doubts,
        comfy_format=comfy_format,
    )


def dequantize(parts: Parts, grid: Grid, chunk: Chunk, workspace: Workspace) -> Values:
    """float32(code) · float32(scale), (r, c)."""
    codes = workspace.read("codes", parts["codes"], chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    return grid.multiply(bits.int8(codes, workspace), chunk, workspace)


FORMATS = tuple(
    Format(
        name=f"int8_{granularity}",
        summary=f"INT8 codes, one scale {of}",
        needs=NEEDS,
        fit=partial(fit, granularity=granularity),
        specification=__doc__ or "",
        usual_db=usual_db,
    )
    for granularity, of, usual_db in (
        ("tensor", "for the tensor", (19, 38)),
        ("row", "a row", (32, 41)),
        ("block", "a block", (32, 41)),
    )
)
