"""The arrangement of fused weights in transformers' files, by ``model_type`` of config.json.

Reference: huggingface/transformers@5.24.0 integrations/moe.py use_experts_implementation (is_concatenated,
is_transposed), models/llama4/modeling_llama4.py Llama4TextExperts, conversion_mapping.py qwen3_vl_moe, pytorch_utils.py
Conv1D.
"""

from collections.abc import Collection

# Rows of gate and up alternate in the fused weight of all experts; elsewhere the rows of up follow the rows of gate.
ALTERNATING = frozenset({"gpt_oss", "openai_privacy_filter"})
# Stacks of experts are [experts, in, out]; elsewhere they are [experts, out, in].
INPUTS_FIRST = frozenset(
    [
        "gpt_oss",
        "openai_privacy_filter",
        "llama4",
        "llama4_text",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "qwen3vlmoe",  # the architecture's name in GGUF files
        "aria",
        "aria_text",
    ]
)
# Linear layers are Conv1D, whose weights are [in, out].
CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})


def is_of(model_types: Collection[str], table: frozenset[str]) -> bool | None:
    """Return whether a model is in a table; None if the model is unknown."""
    return any(model_type in table for model_type in model_types) if model_types else None
