"""Findings about rounding of activations, keys and values, and tables that runtimes read."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Inputs and caches"
CODES = {
    "scale_extreme": FindingCode(
        "warning",
        meaning="activation scales are implausibly large or small",
        example=(
            "activation scales are above 1e+12 or below 1e-12 in 1 tensor of the quantized checkpoint: "
            "model.layers.0.mlp.up_proj.input_scale"
        ),
        remedy="Recalibrate: runtimes that use these scales compute zeros or infinities.",
    ),
    "scale_unlike": FindingCode(
        "warning",
        meaning=(
            "scales of activations or of the KV cache are far from those of other blocks, equal the weight's scale, or "
            "are missing"
        ),
        example=(
            "activation scales of the quantized checkpoint are far from their neighbours in 1 tensor: "
            "model.layers.3.mlp.down_proj.input_scale (1.2e-07; the others' median is 0.0123)"
        ),
        remedy="Recalibrate: runtimes that use these scales give wrong outputs.",
    ),
    "scale_misfit": FindingCode(
        "warning",
        meaning=(
            "the number of activation scales fits neither rows nor columns of their weight, or a KV cache has several "
            "scales where one is declared"
        ),
        example=(
            "activation scales whose number fits neither the rows nor the columns of their weight: "
            "model.layers.0.mlp.up_proj.input_scale (7)"
        ),
        remedy="Recalibrate.",
    ),
    "no_input_scale": FindingCode(
        "info",
        meaning="FP8 layers of ComfyUI without input_scale, whose inputs are clamped at 448",
        example="57 layers in FP8 without input_scale; ComfyUI uses a scale of 1 and clamps inputs at 448",
        remedy="Calibrate an input_scale, or set full_precision_matrix_mult in the layer's label.",
    ),
    "missing_input_scale": FindingCode(
        "warning",
        meaning="config.json declares static scales of inputs, and the file has none for some weights",
        example=(
            "static scales of inputs are declared, but input_scale is missing for 112 weights: "
            "model.layers.0.mlp.up_proj.weight and 111 more"
        ),
        remedy="Calibrate again, or declare dynamic activations: runtimes refuse such a file or take a scale of 1.",
    ),
    "missing_kv_scale": FindingCode(
        "info, warning",
        meaning=(
            "config.json declares an FP8 KV cache, but scales of keys or values are missing; an info if one `kv_scale` "
            "serves both"
        ),
        example=(
            "an FP8 KV cache is declared, but scales of keys and values are missing for 32 attention modules; runtimes "
            "use 1"
        ),
        remedy="Calibrate k_scale and v_scale. With 1, keys above 448 are clamped.",
    ),
    "bad_table": FindingCode(
        "error",
        meaning="a tensor outside any weight, such as rope_freqs, holds NaN, infinities or implausibly large numbers",
        example=(
            "NaN, infinity or values above 1e+09 in 1 tensor of the quantized checkpoint outside any weight: "
            "rope_freqs.weight"
        ),
        remedy="Copy the tensor, which runtimes read, from the original.",
    ),
    "massive_activations": FindingCode(
        "info",
        meaning=(
            "a few tokens have inputs of a weight a hundred times as large as all others (evaluate), as super weights "
            "cause"
        ),
        example=(
            "massive activations: 1 changed weight with an input 310 times as large as others: "
            "model.layers.1.mlp.down_proj.weight"
        ),
        remedy=(
            "Measure the weight alone with `evaluate --swap`: predictions are uncertain here. Keep it unquantized if "
            "it matters."
        ),
    ),
    "large_output_errors": FindingCode(
        "warning",
        meaning="outputs of a weight differ from the original's by more than half (evaluate); scores may not show it",
        example=(
            "large output errors: 12 of 224 changed weights, up to 207 %: model.layers.0.mlp.down_proj.weight and 11 "
            "more"
        ),
        remedy="Compare both checkpoints: `compare` names damage. Otherwise give these weights more bits.",
    ),
    "not_emulated": FindingCode(
        "warning",
        meaning="the files declare rounding of activations, keys or values that evaluate does not emulate",
        example=(
            "inputs of 112 weights were not rounded: its files declare a static activation scale, but store no "
            "input_scale"
        ),
        remedy=(
            "The numbers describe the weights alone. Declare that with --activations none --kv none, or evaluate in "
            "the runtime."
        ),
    ),
}
