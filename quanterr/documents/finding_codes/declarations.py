"""Findings about what configurations, labels and names declare, and what is stored."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Declarations"
CODES = {
    "config_mismatch": FindingCode(
        "warning, error",
        meaning=(
            "config.json, or a GGUF file's metadata, declares another model or other codes than those stored; an error "
            "if loaders then read wrong numbers"
        ),
        example="config.json declares codes of 4 bits, but the tensors hold codes of 8 bits: read as stored",
        remedy="Check that config.json belongs to this model.",
    ),
    "unloadable": FindingCode(
        "warning",
        meaning="the numbers are right, but a runtime refuses or misreads the file",
        example=(
            "vLLM expects scales of channels as [rows, 1], not [rows], and refuses the file with an AssertionError: 1 "
            "tensor: model.layers.0.mlp.up_proj.weight_scale (F32 [64])"
        ),
        remedy="Store the tensors as the runtime expects them, or use another runtime.",
    ),
    "label_without_layer": FindingCode(
        "warning",
        meaning="a header labels layers that are not stored",
        example="the header of the quantized checkpoint labels layers that are not stored: blocks.7.attn.qkv",
        remedy="Check that no shard is missing and that the header was written for this file.",
    ),
    "config_without_codes": FindingCode(
        "warning",
        meaning="config.json declares a quantization method, but no weight is stored quantized",
        example="the configuration declares fp8, but no weight is stored quantized",
        remedy="Check that this is the quantized checkpoint, and not the original with a copied config.json.",
    ),
    "undeclared_codes": FindingCode(
        "info, warning, error",
        meaning=(
            "weights are stored quantized, but no configuration or label declares that to loaders; an info for a whole "
            "denoiser without labels, a warning for plain codes, NVFP4 and labels without a format"
        ),
        example=(
            "config.json declares no quantization, but 112 weights are stored as gptq: loaders look for tensors that "
            "are not stored"
        ),
        remedy=(
            "Put the quantization_config that the quantizer wrote (MLX: quantization) back into config.json; for "
            "ComfyUI, label each quantized layer."
        ),
    ),
    "rotated_weights": FindingCode(
        "error",
        meaning=(
            "config.json declares rotations that are fused into the stored weights, and that their inputs do not undo"
        ),
        example="config.json of the quantized checkpoint declares rotations fused into its weights: R1 (hadamard)",
        remedy="Compare the checkpoint from before the rotations were fused, or use the rotated original.",
    ),
    "missing_rotation": FindingCode(
        "warning",
        meaning=(
            "config.json declares a rotation of weights that nothing undoes at run time, or whose matrix is not stored"
        ),
        example="config.json declares the transform R4: nothing undoes it; the weights stay rotated at run time",
        remedy="Export the model again with both sides of the transform and its matrix.",
    ),
    "ambiguous_layout": FindingCode(
        "info, warning",
        meaning="tensors allow several interpretations, metadata contradicts them, or a vocabulary is padded",
        example=(
            "model.layers.0.mlp.up_proj.weight: blocks of 32 columns are inferred from shapes alone; 25 would fit as "
            "well"
        ),
        remedy="Find out which interpretation is right, and correct the metadata.",
    ),
    "wrong_convention": FindingCode(
        "error",
        meaning=(
            "a weight fits another interpretation better than the one that its program, architecture or configuration "
            "prescribes"
        ),
        example=(
            "model.layers.0.linear_attn.out_proj.weight: 0.0 dB with value heads tiled, as llama.cpp expects; 45.4 dB "
            "with value heads grouped by key head"
        ),
        remedy=(
            "Convert again: a converter left out a step, or did it twice. If your runtime reads it otherwise, correct "
            "the metadata."
        ),
    ),
}
