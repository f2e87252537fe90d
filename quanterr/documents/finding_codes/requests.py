"""Findings about which checkpoints and files were passed, and what recipes and options reach."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "The comparison"
CODES = {
    "identical": FindingCode(
        "info, warning",
        meaning=(
            "both sides are the same; a warning if names and dtypes are, too, an info if what is quantized could not "
            "be read"
        ),
        example="all compared tensors are identical; is this the quantized checkpoint?",
        remedy="Check that the second checkpoint is the quantized one.",
    ),
    "swapped_sides": FindingCode(
        "info, warning",
        meaning=(
            "the original is stored quantized and the quantized checkpoint is not; an info if they differ by no more "
            "than a cast"
        ),
        example="the original stores 224 weights quantized, the quantized checkpoint none: are the arguments swapped?",
        remedy="Pass the original first. Until then, no gate passes.",
    ),
    "quantized_original": FindingCode(
        "info, warning, error",
        meaning="the original is itself quantized, no finer than the quantized checkpoint",
        example=(
            "the original is itself quantized, and no finer than the quantized checkpoint: 112 weights in gguf_q4_0"
        ),
        remedy="Compare with the checkpoint from before any quantization.",
    ),
    "lossless_codes": FindingCode(
        "info, warning",
        meaning=(
            "quantized weights are identical to the original; an info if its values are ternary, binary or constant, "
            "which codes hold exactly"
        ),
        example=(
            "quantization lost nothing: 224 weights stored quantized, each identical to the original, which holds "
            "values that are already rounded"
        ),
        remedy="Compare with the checkpoint from before the quantization.",
    ),
    "left_unquantized": FindingCode(
        "warning",
        meaning="a recipe cannot store some weights and leaves them unquantized; the numbers describe the others",
        example=(
            "gguf_q4_k: 180 weights cannot be stored and stay: model.layers.0.self_attn.q_proj.weight and 179 more "
            "(its 576 columns are not a multiple of 256)"
        ),
        remedy="Choose a recipe that can store them.",
    ),
    "fallback_recipe": FindingCode(
        "info",
        meaning=(
            "weights whose rows do not fill the blocks of a K type are stored in another ggml type, as llama-quantize "
            "does"
        ),
        example=(
            "gguf_q4_k: 180 weights are stored as gguf_q5_0, as llama-quantize does (576 columns do not fill its "
            "blocks)"
        ),
        remedy="Nothing: the size counts what is stored. gguf_q4_k:strict leaves these weights as they are instead.",
    ),
    "nothing_excluded": FindingCode(
        "info",
        meaning="a pattern that excludes layers matches none",
        example='"!vae" excludes nothing: no layer matches it',
        remedy="Correct the pattern, unless you use it for many files, and this one has no such layers.",
    ),
    "many_blocks": FindingCode(
        "info",
        meaning="the model has more than 512 blocks, which are therefore not reported as groups",
        example="more than 512 blocks: not grouped by block",
        remedy="Nothing: each layer is still reported.",
    ),
    "importance_unmatched": FindingCode(
        "error",
        meaning="the importance matrix names none of the compared weights",
        example="the importance matrix names none of the compared weights",
        remedy="Pass the importance matrix that was made for this model.",
    ),
    "importance_missing": FindingCode(
        "info, warning",
        meaning=(
            "the importance matrix does not cover all weights; a warning if it lacks more than 5 % of the quantized "
            "ones"
        ),
        example=(
            "the importance matrix does not cover 112 of 224 quantized weights: model.layers.16.mlp.up_proj.weight and "
            "111 more"
        ),
        remedy=(
            "Nothing, for the output layer, which llama-imatrix skips without --process-output. Otherwise collect the "
            "matrix from the whole model."
        ),
    ),
    "importance_uncovered": FindingCode(
        "warning",
        meaning="the importance matrix has no activations for some experts",
        example="no activations for 3 experts, whose inputs are weighted equally: model.layers.7.mlp.experts.down_proj",
        remedy="Calibrate with more text, so that every expert receives tokens.",
    ),
    "sensitivity_unmatched": FindingCode(
        "error",
        meaning="the sensitivity names none of the compared weights",
        example="the sensitivity names none of the compared weights",
        remedy="Pass the file that `evaluate --sensitivity-out` wrote for this original.",
    ),
    "sensitivity_missing": FindingCode(
        "info",
        meaning="the sensitivity does not cover all weights",
        example="the sensitivity does not cover 1 weight: model.layers.0.conv.weight",
        remedy="Nothing: predictions leave these weights out.",
    ),
    "reference_versions": FindingCode(
        "info",
        meaning="other versions of torch or transformers compute the candidates than computed the reference (evaluate)",
        example="the reference was computed by torch 2.12.0, now 2.13.0: numbers may differ by roundings",
        remedy="Save the reference again with `evaluate --save-reference` to compare to the last digit.",
    ),
}
