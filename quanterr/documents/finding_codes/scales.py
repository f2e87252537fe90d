"""Findings about scales of weights that are absent or cannot be right."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Scales"
CODES = {
    "codes_without_scale": FindingCode(
        "warning, error",
        meaning="codes are stored without a scale; an error if they were cast to plain numbers",
        example=(
            "21 weights hold FP8 E4M3 codes as BF16 numbers, without their scales: the codes were cast, not dequantized"
        ),
        remedy=(
            "Write the file again with its scales, or multiply the codes by them before the cast (quanterr dequantize)."
        ),
    ),
    "dummy_scale": FindingCode(
        "warning",
        meaning="an unquantized weight has a scale of 1, which is ignored",
        example="lm_head.weight is not quantized but has a scale of 1, which was ignored",
        remedy="Quantize this layer, unless it was excluded on purpose.",
    ),
    "fp8_without_scale": FindingCode(
        "info",
        meaning="FP8 weights without a scale, read as plain casts",
        example="FP8 values of 304 tensors are taken for casts without scale: blocks.0.attn.qkv.weight and 303 more",
        remedy="Write the file again with its scales, unless the weights were cast.",
    ),
    "scale_nonfinite": FindingCode(
        "error",
        meaning="scales of weights or activations are NaN or infinite",
        example=(
            "model.layers.3.mlp.up_proj.weight: 1 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are NaN "
            "or infinite"
        ),
        remedy="Quantize this layer again. A division by an all-zero row or block is the usual cause.",
    ),
    "scale_negative": FindingCode(
        "warning",
        meaning="scales are negative",
        example=(
            "model.layers.3.mlp.up_proj.weight: 12 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are "
            "negative"
        ),
        remedy="Quantize these layers again.",
    ),
    "scale_zero": FindingCode(
        "warning",
        meaning="scales are zero, and so are all elements that they apply to",
        example=(
            "model.layers.3.mlp.up_proj.weight: 1 of 2,048 scales in model.layers.3.mlp.up_proj.weight_scale are zero"
        ),
        remedy="A scale underflowed: store it in a wider dtype.",
    ),
    "scale_constant": FindingCode(
        "info",
        meaning="every scale of a weight is 1, as if there were none",
        example="every scale of 304 weights is 1: blocks.0.attn.qkv.weight and 303 more",
        remedy="Write the file again with its scales, unless the weights were cast without any.",
    ),
    "sibling_scales": FindingCode(
        "info, warning",
        meaning=(
            "weights that runtimes fuse have different global scales, or static scales of inputs, of which a runtime "
            "uses one; a warning if that costs much"
        ),
        example="runtimes fuse 12 groups of weights whose global scales differ; the worst by a factor of 2.14",
        remedy="Quantize fused weights (q, k and v; gate and up; w1 and w3) with one shared global scale.",
    ),
}
