"""What the configurations of both checkpoints, or the metadata of a GGUF file, say of one model: where they differ.

Only keys that change what the model computes, and only where both sides say something: programs leave out defaults.
"""

from collections.abc import Iterator, Mapping
from math import isclose
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, GgufMetadata
from quanterr.findings.codes import finding
from quanterr.report.base import Finding
from quanterr.util.strict_json import JsonFields, JsonObject, as_object
from quanterr.util.text import display

SAME = 1e-6  # relative: GGUF has float32
CONFIG, GGUF = "config.json", "the GGUF metadata"
LEAST = 3  # keys that a configuration of a model has at least
REMEDY = "take the original's value, unless the model was changed on purpose: runtimes that follow it compute otherwise"

# Keys that change what a model computes, each with the names that families of architectures have for it.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("d_kv", "kv_channels", "attention_head_dim"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim"),
    "moe_intermediate_size": (),
    "vocab_size": ("padded_vocab_size",),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon", "norm_eps"),
    "hidden_activation": ("hidden_act", "activation_function", "act_fn", "feed_forward_proj"),
    "rope_theta": ("rotary_emb_base",),
    "rope_local_base_freq": (),
    "partial_rotary_factor": ("rotary_pct",),
    "sliding_window": (),
    "attention_bias": ("qkv_bias",),
    "mlp_bias": (),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("moe_topk", "num_experts_per_token"),
    "norm_topk_prob": (),
    "scoring_func": (),
    "routed_scaling_factor": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "logits_scaling": (),
    "logit_scale": (),
    "embedding_multiplier": (),
    "residual_multiplier": (),
    "attention_multiplier": (),
}
OF_GGUF = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "vocab_size": "vocab_size",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
NAMES = {"type": "rope_type"}  # of keys of rope_scaling, by their former ones
ALIKE = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
ROTATED = "rope_freqs.weight"  # of a GGUF file: factors of llama3's rope_scaling
TIED = "tie_word_embeddings"
HEADS = ("lm_head.", "output.", "embed_out.")


class Facts(NamedTuple):
    """What is said of a model by the keys of KEYS, and where."""

    values: JsonFields
    where: str


def of_configs(original: Checkpoint, quantized: Checkpoint) -> Iterator[Finding]:
    """Each key that changes what the model computes and that the two say otherwise."""
    there, here = _facts(original), _facts(quantized)
    if len(there.values) < LEAST or len(here.values) < LEAST:
        return
    unlike = _converted(there.values) if GGUF in (there.where, here.where) and there.where != here.where else ()
    for key, value in there.values.items():
        own = here.values.get(key)
        if own is not None and key not in unlike and key != TIED and not _alike(value, own):
            yield _differs(there, here, key, value, own)
    yield from _tied(there, here, quantized)
    yield from _scaled(there, here, quantized)


def _facts(checkpoint: Checkpoint) -> Facts:
    if checkpoint.gguf is not None:
        return Facts(_of_gguf(checkpoint.gguf), GGUF)
    config = config_of(checkpoint)
    rope = as_object(config.get("rope_parameters"))
    found = {key: config[name] for key, names in KEYS.items() for name in reversed((key, *names)) if name in config}
    if "rope_theta" not in found and "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        found.pop("sliding_window", None)
    for key in (TIED, "kv_lora_rank", "num_nextn_predict_layers", "block_auto_adjust_ff_dim"):
        if key in config:
            found[key] = config[key]
    found["rope_scaling"] = _scaling(as_object(config.get("rope_scaling")) or rope) if found else None
    return Facts({key: value for key, value in found.items() if value is not None}, CONFIG)


def config_of(checkpoint: Checkpoint) -> JsonObject:
    """What config.json says of the model of language, which in models of several is in a place of its own."""
    main = as_object(checkpoint.config.get(CONFIG))
    return main | as_object(main.get("text_config")) | as_object(main.get("llm_config"))


def _of_gguf(metadata: GgufMetadata) -> JsonObject:
    own = {key: metadata.values.get(f"{metadata.architecture}.{name}") for key, name in OF_GGUF.items()}
    epsilons = [metadata.values.get(f"{metadata.architecture}.{name}") for name in EPSILONS]
    own["rms_norm_eps"] = next((epsilon for epsilon in epsilons if epsilon is not None), None)
    return {key: value for key, value in own.items() if isinstance(value, int | float)}


def _converted(config: JsonFields) -> set[str]:
    """Keys that llama.cpp's converter gives another meaning than config.json."""
    unlike = {"hidden_activation", "rope_scaling"}
    if "num_experts" in config or "block_auto_adjust_ff_dim" in config:  # of dense blocks, each expert, or computed
        unlike |= {"intermediate_size"}
    if "kv_lora_rank" in config:  # attention with latent keys is stored as that of one head
        unlike |= {"num_key_value_heads", "head_dim"}
    if config.get("num_nextn_predict_layers"):  # which it counts as blocks
        unlike |= {"num_hidden_layers"}
    return unlike


def _scaling(rope: JsonFields) -> JsonObject | None:
    """rope_scaling by its present names, without what says nothing; empty where nothing is scaled, None of several."""
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        return None
    found = {NAMES.get(key, key): value for key, value in rope.items() if value is not None and key != "rope_theta"}
    return {} if found.get("rope_type", "default") == "default" else found


def _alike(one: object, other: object) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return ALIKE.get(one, one) == ALIKE.get(other, other)
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return isclose(one, other, rel_tol=SAME)
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_alike(one[key], other[key]) for key in one.keys() & other.keys()) and bool(one) == bool(other)
    return bool(one == other)


def _differs(there: Facts, here: Facts, key: str, value: object, own: object) -> Finding:
    message = (
        f"{here.where} of the quantized checkpoint declares {key} {_shown(own)}, {there.where} of the original "
        f"{_shown(value)}"
    )
    return finding("config_mismatch", "warning", None, message, REMEDY, key=key, original=value, quantized=own)


def _shown(value: object) -> str:
    return display(f"{value:.9g}" if isinstance(value, float) else str(value), 200)


def _tied(there: Facts, here: Facts, quantized: Checkpoint) -> Iterator[Finding]:
    """An output layer that is ignored, or one that is said to be stored and is not."""
    value, own = there.values.get(TIED), here.values.get(TIED)
    stored = any(name.startswith(HEADS) for name in quantized.entries)
    if {value, own} == {True, False} and not (own is False and stored):
        yield _differs(there, here, TIED, value, own)


def _scaled(there: Facts, here: Facts, quantized: Checkpoint) -> Iterator[Finding]:
    """A GGUF file without the factors of the frequencies that the original's rope_scaling gives, or with others."""
    if here.where != GGUF or there.where != CONFIG:
        return
    scaling, stored = there.values.get("rope_scaling"), ROTATED in quantized.entries
    if stored and scaling == {}:
        message = f"config.json of the original declares no rope_scaling, the quantized checkpoint stores {ROTATED}"
        remedy = "convert the model again: runtimes rotate by other frequencies"
        yield finding("config_mismatch", "warning", None, message, remedy, key="rope_scaling")
    if not stored and as_object(scaling).get("rope_type") == "llama3":
        message = (
            f"config.json of the original declares rope_scaling llama3, the quantized checkpoint stores no {ROTATED}"
        )
        remedy = "convert the model again: runtimes rotate by other frequencies beyond some thousand tokens"
        yield finding("config_mismatch", "warning", None, message, remedy, key="rope_scaling")
