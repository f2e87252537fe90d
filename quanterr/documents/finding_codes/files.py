"""Findings about files as a whole, and tensors that they hold or lack."""

from quanterr.documents.finding_codes.base import FindingCode

TITLE = "Files"
CODES = {
    "nonstandard_file": FindingCode(
        "warning",
        meaning="--lenient accepted a file that departs from its format, such as by bytes after the last tensor",
        example="model.safetensors: 8 trailing bytes after the last tensor; some loaders ignore them, others refuse",
        remedy="Save the file again with the safetensors library.",
    ),
    "unread_weights": FindingCode(
        "info, warning",
        meaning=(
            "the folder has weight files that were not read; a warning if tensors of the same name differ in shape or "
            "size"
        ),
        example="model-fp8: weight files in the same folder were not read: consolidated.safetensors",
        remedy="Remove them, unless they are for another runtime.",
    ),
    "checksum_mismatch": FindingCode(
        "warning, error",
        meaning=(
            "a file is not the one that the Hugging Face hub has (inspect --hub-checksums); a warning if the hub "
            "states no SHA-256"
        ),
        example=(
            "model.safetensors: its SHA-256 is 7c5d…1421, and the hub states a16a…cb91: it is damaged, or was changed"
        ),
        remedy="Download the file again.",
    ),
    "adapter": FindingCode(
        "warning",
        meaning="the checkpoint is a LoRA adapter, not a model",
        example="lora: a LoRA adapter, not a model: it has low-rank changes of 14 layers",
        remedy="Merge it into its model and compare that; `evaluate --lora` does so with denoisers.",
    ),
    "incomplete": FindingCode(
        "warning",
        meaning="the checkpoint lacks tensors that its own configuration promises, or that all other blocks have",
        example="model.layers.3 lacks mlp.down_proj, which the other 5 blocks of model.layers have",
        remedy="Quantize or convert the model again: loaders refuse it, or fill what is missing with random numbers.",
    ),
    "missing_codes": FindingCode(
        "error",
        meaning="scales or zero points are stored, but the codes that they belong to are not",
        example="model.layers.1.mlp.down_proj has g_idx, qzeros and scales, but no codes: its weight is missing",
        remedy="Download the file again, or quantize the layer again.",
    ),
    "missing_part": FindingCode(
        "warning",
        meaning="some weights lack an optional part, such as pre_quant_scale, that most of their kind have",
        example=(
            "2 weights of 8 lack pre_quant_scale, which the others of the same kind have: experts.3.down_proj.weight "
            "and 1 more"
        ),
        remedy=(
            "Quantize again with calibration data that reaches them: runtimes that fuse such weights refuse the file."
        ),
    ),
    "misnamed_type": FindingCode(
        "info, warning",
        meaning="a GGUF file holds little of the type that general.file_type or its name states; an info for UD- names",
        example="general.file_type states Q4_K_M, but no weight is Q4_K: Q5_0 86%, Q8_0 14%",
        remedy="Name the file after the type that it holds.",
    ),
    "omitted_parts": FindingCode(
        "info",
        meaning="a converter leaves tensors to another file by its rules, such as a vision tower to the mmproj file",
        example=(
            "153 tensors of the original checkpoint are not a part of this comparison: in the file of the projector "
            "(mmproj)"
        ),
        remedy="Compare the other file with the same original as well.",
    ),
    "computed_buffer": FindingCode(
        "info",
        meaning=(
            "tensors that the model computes itself (position_ids, inv_freq, causal masks) are stored on one side only"
        ),
        example="only the original checkpoint stores 1 tensor that the model computes: embeddings.position_ids",
        remedy="Nothing: loaders compute them.",
    ),
    "not_read": FindingCode(
        "error",
        meaning="no format fits the tensors of a weight",
        example="model.layers.0.mlp.up_proj.weight: not read: its scale is missing",
        remedy="Read the reason in the message, then see quanterr guide formats and quanterr guide troubleshooting.",
    ),
}
