"""Values that programs assume for keys which a configuration lacks: llama.cpp for GGUF metadata, transformers for JSON.

    OF_LLAMA_CPP       key of config.json → key of the metadata, and llama.cpp's default for any language model
    OF_ARCHITECTURE    the same for the architectures whose code reads further keys, or has defaults of its own
    ROPE_THETA         model_type → transformers' default, for the models whose default never changed

Keys without which llama.cpp refuses a file, such as the epsilon of norms, are not here.

Reference: ggml-org/llama.cpp@0034230 src/llama-model.cpp load_hparams; ggml-org/llama.cpp src/llama-hparams.h and
src/models/: load_arch_hparams of gemma2.cpp, gemma3.cpp, granite.cpp, glm4-moe.cpp and deepseek2.cpp;
huggingface/transformers@5.24.0 default_theta in modeling_rope_utils.py and models/gemma3.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from quanterr.checkpoints import GgufMetadata
from quanterr.util.strict_json import JsonFields, JsonObject

Computed = Callable[[JsonFields], float | None]  # computes a default from other values, by the keys of config.json


class Default(NamedTuple):
    """A key of GGUF metadata, and the value that llama.cpp assumes if it is absent; a function may return None."""

    key: str
    value: float | bool | str | Computed


def _divide_width(values: JsonFields) -> float | None:
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def _scale_attention(values: JsonFields) -> float | None:
    size = values.get("head_dim") or _divide_width(values)
    return size**-0.5 if isinstance(size, int) else None


def _count_heads(values: JsonFields) -> float | None:
    heads = values.get("num_attention_heads")
    return heads if isinstance(heads, int) else None


OF_LLAMA_CPP: Mapping[str, Default] = {
    "num_key_value_heads": Default("attention.head_count_kv", _count_heads),
    "head_dim": Default("attention.key_length", _divide_width),
    "rope_theta": Default("rope.freq_base", 10000.0),
}
ROTATED_PART = Default(
    "rope.dimension_count", 1.0
)  # counts elements; config.json states their share as partial_rotary_factor
GRANITE: Mapping[str, Default] = {
    "residual_multiplier": Default("residual_scale", 1.0),
    "embedding_multiplier": Default("embedding_scale", 1.0),
    "attention_multiplier": Default("attention.scale", _scale_attention),
}
EXPERTS: Mapping[str, Default] = {
    "routed_scaling_factor": Default("expert_weights_scale", 1.0),
    "norm_topk_prob": Default("expert_weights_norm", False),
}
OF_ARCHITECTURE: Mapping[str, Mapping[str, Default]] = {
    "gemma2": {
        "sliding_window": Default("attention.sliding_window", 4096),
        "attn_logit_softcapping": Default("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": Default("final_logit_softcapping", 30.0),
    },
    "gemma3": {
        "sliding_window": Default("attention.sliding_window", "none"),
        "rope_local_base_freq": Default("rope.freq_base_swa", 10000.0),
    },
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitehybrid": GRANITE,
    "deepseek2": {**EXPERTS, "scoring_func": Default("expert_gating_func", "softmax")},
    "glm4moe": EXPERTS,
}
GATES: Mapping[object, str] = {1: "softmax", 2: "sigmoid"}  # numbers of expert_gating_func
ROPE_THETA: Mapping[str, float] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), 10000.0),
    **dict.fromkeys(("gemma3", "gemma3_text"), 1_000_000.0),
}


def list_keys(architecture: str | None) -> Mapping[str, str]:
    """Return the keys of the metadata that only this architecture's code reads, by the keys of config.json."""
    return {key: default.key for key, default in OF_ARCHITECTURE.get(architecture or "", {}).items()}


def assume_for_gguf(metadata: GgufMetadata, declared: JsonFields) -> tuple[JsonObject, Mapping[str, str]]:
    """Return the values that llama.cpp assumes for absent keys of a language model, and a text about each."""
    if not isinstance(declared.get("num_hidden_layers"), int):
        return {}, MappingProxyType({})
    rows = {**OF_LLAMA_CPP, "partial_rotary_factor": ROTATED_PART}
    rows |= OF_ARCHITECTURE.get(metadata.architecture or "", {})
    values: JsonObject = {}
    facts = {}
    for key, default in rows.items():
        name = f"{metadata.architecture}.{default.key}"
        if name in metadata.values:
            continue
        value = default.value(declared) if callable(default.value) else default.value
        if value is not None:
            shown = f"{value:.9g}" if isinstance(value, float) else str(value).lower()
            values[key], facts[key] = value, f"lacks {name}, so that llama.cpp takes {shown} for {key}"
    return values, facts


def assume_for_transformers(config: JsonFields) -> tuple[JsonObject, Mapping[str, str]]:
    """Return the values that transformers assumes for absent keys, and a text about each."""
    model = config.get("model_type")
    base = ROPE_THETA.get(model) if isinstance(model, str) else None
    if base is None or config.get("rope_theta") is not None or config.get("rope_parameters"):
        return {}, MappingProxyType({})
    return {"rope_theta": base}, {"rope_theta": f"lacks rope_theta, so that transformers takes {base:.9g}"}
