"""Differences between the configurations (config.json or GGUF metadata) of both checkpoints.

Only keys that change the model's outputs count. Programs omit defaults: if a side lacks a key, the value that loaders
assume is compared if it is known (defaults.py); otherwise the key is not compared.
"""

from collections.abc import Iterator, Mapping
from math import inf, isclose
from types import MappingProxyType
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, GgufMetadata
from quanterr.documents.base import Finding
from quanterr.findings.checks import BOTH, DECLARED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.contents import Comparison
from quanterr.findings.defaults import GATES, assume_for_gguf, assume_for_transformers, list_keys
from quanterr.pairing.tied import find_tied_head
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonFields, JsonObject, as_object
from quanterr.util.text import display

FLOAT32_ERROR = 2.0**-23  # largest relative difference of equal numbers: GGUF stores float32
CONFIG, GGUF = "config.json", "the GGUF metadata"
EMBEDDING = "embedding"  # role
MIN_KEYS = 3  # every model's configuration has at least so many keys
REMEDY = "use the original's value unless the model was changed on purpose: runtimes follow what is declared"

# Keys that change a model's outputs, each with its names in other families of architectures.
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
GGUF_KEYS = {
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
ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # keys that transformers 5 moved into rope_parameters
RENAMED_ROPE_KEYS = {"type": "rope_type"}  # keys of rope_scaling: former name → present name
SAME_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
ROPE_FACTORS = "rope_freqs.weight"  # in a GGUF file: the factors of llama3's rope_scaling
SHORT_ROPE_FACTORS = "rope_factors_short.weight"  # in a GGUF file: the factors of longrope
SCALING_FACTOR_KEYS = ("rope.scaling.factor", "rope.scale_linear")  # keys of a GGUF file for the factor of a scaling
LONGROPE_TYPES, SCALED_TYPES = ("longrope", "su"), ("linear", "yarn")  # values of rope_type
TIED = "tie_word_embeddings"
# Keys that explain why llama.cpp's converter writes other sizes.
SIZE_KEYS = (
    "kv_lora_rank",
    "num_nextn_predict_layers",
    "block_auto_adjust_ff_dim",
    "global_head_dim",
    "per_layer_config",
)
HEADS = ("lm_head.", "output.", "embed_out.")
SAMPLE_BYTES = 1 << 12  # first bytes of two weights that are compared


class ModelFields(NamedTuple):
    """Values that a configuration declares, by the keys of KEYS, and the place that declares them.

    ``assumed`` are the values that loaders take for keys which it lacks, and ``facts`` the texts about them.
    """

    values: JsonFields
    where: str
    assumed: JsonFields = MappingProxyType({})
    facts: Mapping[str, str] = MappingProxyType({})

    def find(self, key: str) -> object:
        """Return the declared or assumed value of a key; None if it is unknown."""
        return self.values.get(key, self.assumed.get(key))

    def describe(self, key: str) -> str:
        """Return what the configuration says about a key."""
        return f"declares {key} {_show(self.values[key])}" if key in self.values else self.facts[key]


@check("config_mismatch", needs=DECLARED, of=BOTH)
def check_configs(comparison: Comparison) -> Iterator[Finding]:
    """Report keys that both sides declare differently."""
    yield from compare_configs(comparison.original.checkpoint, comparison.quantized.checkpoint)


def compare_configs(original: Checkpoint, quantized: Checkpoint) -> Iterator[Finding]:
    """Report each key that changes the model's outputs and that the two checkpoints declare differently."""
    there, here = _read_fields(original), _read_fields(quantized)
    if len(there.values) < MIN_KEYS or len(here.values) < MIN_KEYS:
        return
    incomparable = (
        _list_incomparable_keys(there.values) if GGUF in (there.where, here.where) and there.where != here.where else ()
    )
    if GGUF not in (there.where, here.where):  # one program loads both sides, with the same defaults
        there, here = (ModelFields(side.values, side.where) for side in (there, here))
    for key in {**there.values, **there.assumed}:
        value, here_value = there.find(key), here.find(key)
        if here_value is None or key in incomparable or key == TIED or _are_equal(value, here_value):
            continue
        if key != "vocab_size" or not _stores_rows(quantized, here_value):  # additional rows have their own finding
            yield _report_difference(there, here, key)
    yield from _check_tied_head(there, here, original, quantized)
    yield from _check_rope_scaling(there, here, quantized)


def _stores_rows(checkpoint: Checkpoint, number: object) -> bool:
    """Return True if the embedding of a checkpoint has this number of rows."""
    return any(entry.shape[:1] == (number,) for name, entry in checkpoint.entries.items() if role_of(name) == EMBEDDING)


def _read_fields(checkpoint: Checkpoint) -> ModelFields:
    """Return the declared values of a checkpoint under the keys of KEYS."""
    if checkpoint.gguf is not None:
        values = _read_gguf_fields(checkpoint.gguf)
        return ModelFields(values, GGUF, *assume_for_gguf(checkpoint.gguf, values))
    config = checkpoint.model_config
    rope = as_object(config.get("rope_parameters"))
    declared = {key: config[name] for key, names in KEYS.items() for name in reversed((key, *names)) if name in config}
    declared |= {key: rope[key] for key in ROPE_KEYS if key not in declared and key in rope}
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        declared.pop("sliding_window", None)
    for key in (TIED, *SIZE_KEYS):
        if key in config:
            declared[key] = config[key]
    declared["rope_scaling"] = (
        _normalize_rope_scaling(as_object(config.get("rope_scaling")) or rope) if declared else None
    )
    values = {key: value for key, value in declared.items() if value is not None}
    return ModelFields(values, CONFIG, *assume_for_transformers(config))


def _read_gguf_fields(metadata: GgufMetadata) -> JsonObject:
    """Return the values that GGUF metadata declares, by the keys of KEYS."""
    names = {**GGUF_KEYS, **list_keys(metadata.architecture)}
    raw = {key: metadata.values.get(f"{metadata.architecture}.{name}") for key, name in names.items()}
    epsilons = [metadata.values.get(f"{metadata.architecture}.{name}") for name in EPSILONS]
    raw["rms_norm_eps"] = next((epsilon for epsilon in epsilons if epsilon is not None), None)
    layers, predicting = raw["num_hidden_layers"], metadata.get_model_int("nextn_predict_layers") or 0
    if isinstance(layers, int):
        raw["num_hidden_layers"] = layers - predicting  # block_count includes the layers of multi-token prediction
    fields: JsonObject = {
        key: value
        for key, value in raw.items()
        if isinstance(value, bool) or (isinstance(value, int | float) and value)
    }
    if "scoring_func" in fields:
        fields["scoring_func"] = GATES.get(raw["scoring_func"])
    return fields


def _list_incomparable_keys(config: JsonFields) -> set[str]:
    """Return the keys whose values mean something else in config.json than in the file of llama.cpp's converter."""
    incomparable = {"hidden_activation", "rope_scaling"}
    # The size may be that of dense blocks or of single experts, and the converter computes some sizes.
    if "num_experts" in config or "block_auto_adjust_ff_dim" in config:
        incomparable |= {"intermediate_size"}
    if "kv_lora_rank" in config:  # attention with latent keys is stored as if it had one head
        incomparable |= {"num_key_value_heads", "head_dim"}
    if config.keys() & {"global_head_dim", "per_layer_config"}:  # heads of layers with full attention are wider
        incomparable |= {"head_dim"}
    if "alpha" in as_object(config.get("rope_scaling")):  # Hunyuan: the converter computes another base from it
        incomparable |= {"rope_theta"}
    if config.get("num_nextn_predict_layers"):  # the converter counts these layers as blocks
        incomparable |= {"num_hidden_layers"}
    return incomparable


def _normalize_rope_scaling(rope: JsonFields) -> JsonObject | None:
    """Return rope_scaling with present key names and without empty keys.

    The result is empty if nothing is scaled, and None if the scaling depends on the type of the layer.
    """
    if any(isinstance(value, dict) for value in rope.values()):  # one for each type of layer
        return None
    scaling = {
        RENAMED_ROPE_KEYS.get(key, key): value
        for key, value in rope.items()
        if value is not None and key != "rope_theta"
    }
    return {} if scaling.get("rope_type", "default") == "default" else scaling


def _are_equal(value: object, other: object) -> bool:
    """Return True if two declared values mean the same."""
    if isinstance(value, list) and not isinstance(other, list):  # one value per layer
        return any(_are_equal(element, other) for element in value)
    if isinstance(value, str) and isinstance(other, str):
        return SAME_ACTIVATIONS.get(value, value) == SAME_ACTIVATIONS.get(other, other)
    numbers = (int, float)
    if isinstance(value, numbers) and isinstance(other, numbers):
        return value == other or isclose(_as_float(value), _as_float(other), rel_tol=FLOAT32_ERROR)
    if isinstance(value, dict) and isinstance(other, dict):
        return all(_are_equal(value[key], other[key]) for key in value.keys() & other.keys()) and bool(value) == bool(
            other
        )
    return bool(value == other)


def _as_float(number: float) -> float:
    """Return a number as a float; infinity if it is too large."""
    try:
        return float(number)
    except OverflowError:
        return inf if number > 0 else -inf


def _report_difference(there: ModelFields, here: ModelFields, key: str) -> Finding:
    """Return the finding that the two sides declare ``key`` differently."""
    value, here_value = there.find(key), here.find(key)
    there_text = _show(value) if key in there.values and key in here.values else there.describe(key)
    message = (
        f"{here.where} of the quantized checkpoint {here.describe(key)}, {there.where} of the original {there_text}"
    )
    return make_finding(
        "config_mismatch", "warning", None, message, REMEDY, key=key, original=value, quantized=here_value
    )


def _show(value: object) -> str:
    """Format a declared value for a message."""
    return display(f"{value:.9g}" if isinstance(value, float) else str(value), 200)


def _check_tied_head(
    there: ModelFields, here: ModelFields, original: Checkpoint, quantized: Checkpoint
) -> Iterator[Finding]:
    """Report a stored output layer that runtimes ignore, or a declared output layer that is missing."""
    value, here_value = there.values.get(TIED), here.values.get(TIED)
    stored = any(name.startswith(HEADS) for name in quantized.entries)
    if (value, here_value) in ((True, False), (False, True)) and not (here_value is False and stored):
        yield _report_difference(there, here, TIED)
    elif value is None and here_value is True and stored and (head := _find_untied_head(original)):
        message = (
            f"{here.where} of the quantized checkpoint declares {TIED}, {there.where} of the original does not, and "
            f"its {display(head)} is not its embedding: loaders of the quantized checkpoint ignore the output layer"
        )
        yield make_finding("config_mismatch", "warning", None, message, REMEDY, key=TIED, original=None, quantized=True)


def _find_untied_head(checkpoint: Checkpoint) -> str | None:
    """Return the output layer if its first values are not those of the embedding; None if they may be tied."""
    tied = find_tied_head({TIED: True}, checkpoint.entries)
    if tied is None:
        return None
    head, embedding = (checkpoint.entries[name] for name in tied)
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return None
    n = min(SAMPLE_BYTES, head.nbytes)
    first, other = (entry.file.read(entry.offset, n) for entry in (head, embedding))
    return None if first == other else tied.head


def _check_rope_scaling(there: ModelFields, here: ModelFields, quantized: Checkpoint) -> Iterator[Finding]:
    """Report a GGUF file whose rotary factors are missing although the original declares them, or the reverse."""
    if here.where != GGUF or there.where != CONFIG:
        return
    scaling, stored = there.values.get("rope_scaling"), ROPE_FACTORS in quantized.entries
    if stored and scaling == {}:
        message = (
            f"config.json of the original declares no rope_scaling, but the quantized checkpoint stores {ROPE_FACTORS}"
        )
        remedy = "convert the model again: runtimes would rotate by other frequencies"
        yield make_finding("config_mismatch", "warning", None, message, remedy, key="rope_scaling")
    rope = as_object(scaling)
    rope_type = str(rope.get("rope_type"))
    lacking = _find_lacking_factors(rope_type, rope.get("factor"), quantized)
    if lacking:
        message = (
            f"config.json of the original declares rope_scaling {rope_type}, but the quantized checkpoint {lacking}"
        )
        when = "beyond a few thousand tokens " if rope_type == "llama3" else ""
        remedy = f"convert the model again: {when}runtimes would rotate by other frequencies"
        yield make_finding("config_mismatch", "warning", None, message, remedy, key="rope_scaling")


def _find_lacking_factors(rope_type: str, factor: object, quantized: Checkpoint) -> str | None:
    """Return a text about what a GGUF file lacks for a declared rope_type; None if it lacks nothing."""
    needed = {"llama3": ROPE_FACTORS, **dict.fromkeys(LONGROPE_TYPES, SHORT_ROPE_FACTORS)}.get(rope_type)
    if needed is not None:
        return None if needed in quantized.entries else f"stores no {needed}"
    if rope_type not in SCALED_TYPES or factor in (None, 1, 1.0) or quantized.gguf is None:
        return None
    values, architecture = quantized.gguf.values, quantized.gguf.architecture
    if not any(f"{architecture}.{key}" in values for key in SCALING_FACTOR_KEYS):
        return f"lacks {architecture}.{SCALING_FACTOR_KEYS[0]}, so that llama.cpp scales nothing"
    name = f"{architecture}.rope.scaling.type"
    return None if rope_type == "linear" or name in values else f"lacks {name}, so that llama.cpp scales linearly"
