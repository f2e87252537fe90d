"""INT8 codes with a scale: one for the tensor, one per row, or one per block.

    weight    i8                (rows, cols), or (experts, rows, cols); TurboDiffusion calls it int8_weight
    scale     f32, bf16, f16
    pre_quant_scale             (cols,), if the layer multiplies its input by it (ModelOpt): see
                                shared/pre_quant_scale.py; optional

    weight[r, c] = float32(code[r, c]) * float32(scale of r, c)                        one rounding

The scale is called weight_scale, scale_weight (old convert_to_quant files, which have no label at all), scale or
weight_scale_inv. shared/scale_grid.py assigns scales to elements.

Reference: comfyanonymous/ComfyUI@6db4fa2f comfy/ops.py, Comfy-Org/comfy-kitchen@7d86acf tensor/int8.py;
silveroxides/convert_to_quant@1.3.4 comfy/quant_ops.py; thu-ml/TurboDiffusion@0a24c7e1 turbodiffusion/ops/core.py
Int8Linear; vllm-project/compressed-tensors@ac8e2ba8 compressors/naive_quantized/base.py.
"""

from functools import partial

from quanterr.formats.base import LazyWeights, Parts, PartSpec, Weight
from quanterr.formats.shared.comfy_labels import INT8, INT8_LABELS
from quanterr.formats.shared.pre_quant_scale import PART
from quanterr.formats.shared.scale_grid import fit_scaled, make_scaled_formats
from quanterr.formats.shared.scaled_int8 import NEEDS, read_as_rotated

TURBO_SUFFIX = ".int8_weight"  # end of the name of TurboDiffusion's codes
CODES = PartSpec(("{weight}", "{module}" + TURBO_SUFFIX), INT8)
ROTATIONS = (256, 64, 16, 1024)  # group sizes that writers for ComfyUI use


def fit(parts: Parts) -> Weight | None:
    """Return the weight if no label declares a rotation; its scale's shape decides which row of FORMATS it is.

    Some writers for ComfyUI rotate without a label and write no config.json, so rotated columns are an alternative.
    """
    if parts.hints.labels and parts.hints.labels[0].rotated:
        return None
    if parts.hints.config.get("quant_method") == "w4afp8":  # bytes of W4AFP8 hold two codes
        return None
    weight = _fit_plain(parts)
    is_plain = parts.hints.config or parts.get("pre_quant_scale") or parts.codes.name.endswith(TURBO_SUFFIX)
    if len(weight.shape) != 2 or is_plain:
        return weight
    sizes = [size for size in ROTATIONS if weight.shape[1] % size == 0]
    rotated = LazyWeights(partial(_make_rotated, parts), sizes)
    weight.alternatives = (*weight.alternatives, *rotated) if weight.alternatives else rotated
    weight.prescribed = weight.prescribed or bool(parts.hints.labels)
    return weight


def _fit_plain(parts: Parts) -> Weight:
    return fit_scaled(parts, "int8", INT8_LABELS)


def _make_rotated(parts: Parts, size: int) -> Weight:
    return read_as_rotated(parts, _fit_plain(parts), size)


FORMATS = make_scaled_formats(
    "int8",
    {**NEEDS, "codes": CODES, "pre_quant_scale": PART},
    fit,
    {"tensor": (19, 40), "row": (32, 43), "block": (32, 44)},
)
