"""Findings about norms, biases and other tensors that were changed, cast or folded."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Unquantized tensors"
CODES = {
    "norm_offset": FindingCode(
        "warning, error",
        meaning="norms are centred on 0 on one side and on 1 on the other; a warning if all are, else an error",
        example=(
            "65 norms of the quantized checkpoint are the original's plus 1 throughout: model.norm.weight and 64 more"
        ),
        remedy=(
            "Some models compute (1 + weight) · x: check that the runtime of the quantized model expects what is "
            "stored."
        ),
    ),
    "folded_scales": FindingCode(
        "info, warning, error",
        meaning="scales were folded into the preceding layer, which the comparison undoes",
        example=(
            "scales of 3 weights (model.layers.0.self_attn.q_proj.weight and 2 more) were folded into "
            "model.layers.0.input_layernorm.weight; the comparison undoes that: 19.8 dB, 6.1 dB as stored"
        ),
        remedy=(
            "Nothing, if both tensors are used together. Otherwise layers, rows or a bias lack the scales; quantize "
            "them again."
        ),
    ),
    "bias_corrected": FindingCode(
        "info, warning",
        meaning=(
            "biases of quantized weights changed, as corrections of some quantizers do; a warning if by more than a "
            "correction needs"
        ),
        example=(
            "2 biases of quantized weights changed, as corrections do: layers.0.attention.key.bias, "
            "layers.1.attention.key.bias"
        ),
        remedy="Nothing, for an info. A warning: evaluate the model.",
    ),
    "unquantized_changed": FindingCode(
        "warning, error",
        meaning=(
            "unquantized tensors differ by more than a cast explains; an error if at least half do: the original is "
            "then another checkpoint, and what is wrong with single weights is left out"
        ),
        example="3 of 65 tensors that both checkpoints store unquantized differ by more than a cast explains",
        remedy="Check that both checkpoints come from the same training step and merge.",
    ),
    "cast_down": FindingCode(
        "warning",
        meaning="tensors that the original keeps in F32 among 16-bit ones lost digits in a cast",
        example="3 tensors that the original keeps in F32 among 16-bit ones are stored as BF16: attn_hc.fn …",
        remedy="Keep these tensors in F32: they are small, and routing, recurrences or mixing depend on them.",
    ),
    "cast_coarse": FindingCode(
        "info",
        meaning="tensors were cast to another dtype without rounding to the nearest: truncated, or rounded at random",
        example=(
            "casts of 3 tensors did not round to the nearest value: lm_head.weight and 2 more; they truncated, or "
            "rounded at random"
        ),
        remedy="Nothing urgent: rounding to the nearest value halves the error.",
    ),
    "other_changes": FindingCode(
        "info",
        meaning="norms, biases or other 1-D tensors changed, other than biases that bias_corrected names",
        example="64 norms, biases or other 1-D tensors changed; see other_changes",
        remedy="Nothing, if the quantizer casts them, folds scales into them or corrects biases.",
    ),
}
