"""INT8 codes with a scale: one for the tensor, one a row, or one a block.

    weight    i8                (rows, cols), or (experts, rows, cols)
    scale     f32, bf16, f16

    weight[r, c] = float32(code[r, c]) * float32(scale of r, c)                        one rounding

The scale is called weight_scale, scale_weight (old convert_to_quant files, which carry no label at all)
or weight_scale_inv. Which element has which scale: shared/scale_grid.py.

Reference: comfyanonymous/ComfyUI comfy/ops.py, Comfy-Org/comfy-kitchen tensor/int8.py;
silveroxides/convert_to_quant comfy/quant_ops.py; vllm-project/compressed-tensors
compressors/naive_quantized/base.py.
"""

from dataclasses import replace
from functools import partial

from quanterr.formats.base import Part, Parts, Values, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FLOATS, INT8, INT8_LABELS
from quanterr.formats.shared.convrot import unrotate
from quanterr.formats.shared.padding import Padded, fit_padded
from quanterr.formats.shared.scale_grid import Grid, fit_scaled, scaled_formats
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

ROTATIONS = (256, 64, 16, 1024)  # in which ComfyUI's writers rotate
NAMES = (
    "{weight}_scale",
    "{weight}_scale_inv",
    "{module}.scale_weight",
    "{module}.scale",
    "{weight}.scale",
)
NEEDS = {"codes": Part(("{weight}",), INT8), "scale": Part(NAMES, FLOATS)}


def fit(granularity: str, parts: Parts) -> Weight | None:
    """The weight, if its scale has that granularity and no label says that it is rotated.

    Some writers for ComfyUI, which put no config.json beside their files, rotate and do not say so: as
    rotated it is a further reading.
    """
    if parts.hints.labels and parts.hints.labels[0].rotated:
        return None
    weight = fit_scaled(parts, "int8", granularity, INT8_LABELS, multiplied, uniform_bits=8)
    if weight is None or len(weight.shape) != 2 or parts.hints.config:
        return weight
    rotated = (turned_back(parts, weight, size) for size in ROTATIONS if weight.shape[1] % size == 0)
    return weight.or_else((*weight.alternatives, *rotated))


def turned_back(parts: Parts, plain: Weight, size: int) -> Weight:
    """A weight as what it is if its columns were rotated in groups of ``size``."""
    padded = fit_padded(parts, plain.shape, size, 1)
    return replace(
        plain,
        format="int8_convrot",
        dequantize=partial(_turn_back, plain, padded),
        evidence=(f"{plain.evidence[0]}; rotated in groups of {size}",),
    )


def _turn_back(plain: Weight, padded: Padded, chunk: Chunk, workspace: Workspace) -> Values:
    def block(chunk: Chunk, workspace: Workspace) -> Values:
        rotated = plain.dequantize(chunk, workspace)
        return Values(unrotate(rotated.weight, padded.step, workspace), rotated.saturated)

    return padded.dequantize(chunk, workspace, block)


def multiplied(parts: Parts, grid: Grid, chunk: Chunk, workspace: Workspace) -> Values:
    """float32(code) · float32(scale), (r, c)."""
    codes = workspace.read("codes", parts["codes"], chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    return grid.multiply(element_types.int8(codes, workspace), chunk, workspace)


FORMATS = scaled_formats("int8", NEEDS, fit, __doc__, {"tensor": (19, 38), "row": (32, 41), "block": (32, 41)})
