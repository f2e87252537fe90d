"""FP8 codes with a scale: one for the tensor, one per row, or one per block.

    weight    f8_e4m3 or f8_e5m2    (rows, cols), or (experts, rows, cols)
    scale     f32, bf16, f16; weight_scale_inv and .scale also f8_e8m0 or u8 (an E8M0 exponent)

    weight[r, c] = float32(code[r, c]) * float32(scale of r, c)                        one rounding

The scale multiplies under each of its names: weight_scale (compressed-tensors, vLLM, ModelOpt, FBGEMM, ComfyUI),
scale_weight (old ComfyUI files), weight_scale_inv (DeepSeek, transformers: the inverse of the quantization factor),
.scale (DeepSeek-V4), qscale_weight (Mistral), weights_scaling_factor (TensorRT-LLM), X_scale and X_scale_inv for a
stacked X without .weight.
shared/scale_grid.py assigns scales to elements. Runtimes round weight and scale to their compute dtype first; that
is not part of the format and not done here.

Reference: comfyanonymous/ComfyUI@6db4fa2f comfy/ops.py, Comfy-Org/comfy-kitchen@7d86acf tensor/fp8.py;
deepseek-ai/DeepSeek-V3@9b4e9788 inference/kernel.py; vllm-project/compressed-tensors@ac8e2ba8
compressors/naive_quantized/base.py; NVIDIA/TensorRT-LLM@01c4ece docs/source/architecture/checkpoint.md.
"""

from quanterr.formats.base import Parts, PartSpec, Weight
from quanterr.formats.shared.comfy_labels import FLOATS, FP8, FP8_LABELS
from quanterr.formats.shared.scale_grid import fit_scaled, make_scaled_formats

EXPONENTS = frozenset({"F8_E8M0", "U8"})
NAMES = (
    "{weight}_scale",
    "{weight}_scale_inv",
    "{weight}_weight_scale",
    "{module}.scale_weight",
    "{module}.scale",
    "{module}.qscale_weight",
    "{module}.weights_scaling_factor",
    "{weight}.scale",
)
NEEDS = {"codes": PartSpec(("{weight}",), FP8), "scale": PartSpec(NAMES, FLOATS | EXPONENTS)}


def fit(parts: Parts) -> Weight:
    """Return the weight, as the row of FORMATS that its scale's shape decides."""
    return fit_scaled(parts, "fp8", FP8_LABELS)


FORMATS = make_scaled_formats("fp8", NEEDS, fit, {"tensor": (31, 32), "row": (31, 33), "block": (31, 33)})
