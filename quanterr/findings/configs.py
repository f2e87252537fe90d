"""Differences between the configurations (config.json or GGUF metadata) of both checkpoints.

Only keys that change the model's outputs count. Programs omit defaults: where a side lacks a key, and what loaders then
assume is known (defaults.py), that counts; else the key is not compared.
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

FLOAT32 = 2.0**-23  # largest relative difference of equal numbers: GGUF stores float32
CONFIG, GGUF = "config.json", "the GGUF metadata"
EMBEDDING = "embedding"  # role
LEAST = 3  # any model's configuration has this many keys
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
OF_ROPE = ("rope_theta", "partial_rotary_factor")  # keys that transformers 5 moved into rope_parameters
NAMES = {"type": "rope_type"}  # keys of rope_scaling: former name → present name
ALIKE = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
ROTATED = "rope_freqs.weight"  # in a GGUF file: the factors of llama3's rope_scaling
SHORT = "rope_factors_short.weight"  # in a GGUF file: the factors of longrope
FACTORS = ("rope.scaling.factor", "rope.scale_linear")  # keys of a GGUF file for the factor of a scaling
LONGROPE, SCALED = ("longrope", "su"), ("linear", "yarn")  # kinds of rope_scaling
TIED = "tie_word_embeddings"
# Keys that explain why llama.cpp's converter writes other sizes.
EXPLAINING = (
    "kv_lora_rank",
    "num_nextn_predict_layers",
    "block_auto_adjust_ff_dim",
    "global_head_dim",
    "per_layer_config",
)
HEADS = ("lm_head.", "output.", "embed_out.")
SAMPLED = 1 << 12  # bytes that show whether two weights are the same


class ModelFields(NamedTuple):
    """Values that a configuration declares, by the keys of KEYS, and the place that declares them.

    ``assumed`` are the values that loaders take for keys which it lacks; ``facts`` says so in words.
    """

    values: JsonFields
    where: str
    assumed: JsonFields = MappingProxyType({})
    facts: Mapping[str, str] = MappingProxyType({})

    def find(self, key: str) -> object:
        """Return the value that counts for a key; None if it is unknown."""
        return self.values.get(key, self.assumed.get(key))

    def describe(self, key: str) -> str:
        """Return what the configuration says about a key."""
        return f"declares {key} {_show(self.values[key])}" if key in self.values else self.facts[key]


@check("config_mismatch", needs=DECLARED, of=BOTH)
def check_configs(comparison: Comparison) -> Iterator[Finding]:
    """Report what both sides declare differently."""
    yield from compare_configs(comparison.original.checkpoint, comparison.quantized.checkpoint)


def compare_configs(original: Checkpoint, quantized: Checkpoint) -> Iterator[Finding]:
    """Report each key that changes the model's outputs and that the two checkpoints declare differently."""
    there, here = _read_fields(original), _read_fields(quantized)
    if len(there.values) < LEAST or len(here.values) < LEAST:
        return
    unlike = (
        _keys_of_other_meaning(there.values) if GGUF in (there.where, here.where) and there.where != here.where else ()
    )
    if GGUF not in (there.where, here.where):  # the same program assumes the same for both
        there, here = (ModelFields(side.values, side.where) for side in (there, here))
    for key in {**there.values, **there.assumed}:
        value, own = there.find(key), here.find(key)
        if own is None or key in unlike or key == TIED or _are_equal(value, own):
            continue
        if key != "vocab_size" or not _stores_rows(quantized, own):  # else more rows are reported with the weight
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
    found = {key: config[name] for key, names in KEYS.items() for name in reversed((key, *names)) if name in config}
    found |= {key: rope[key] for key in OF_ROPE if key not in found and key in rope}
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        found.pop("sliding_window", None)
    for key in (TIED, *EXPLAINING):
        if key in config:
            found[key] = config[key]
    found["rope_scaling"] = _normalize_rope_scaling(as_object(config.get("rope_scaling")) or rope) if found else None
    values = {key: value for key, value in found.items() if value is not None}
    return ModelFields(values, CONFIG, *assume_for_transformers(config))


def _read_gguf_fields(metadata: GgufMetadata) -> JsonObject:
    """Return the values that GGUF metadata declares, by the keys of KEYS."""
    names = {**OF_GGUF, **list_keys(metadata.architecture)}
    own = {key: metadata.values.get(f"{metadata.architecture}.{name}") for key, name in names.items()}
    epsilons = [metadata.values.get(f"{metadata.architecture}.{name}") for name in EPSILONS]
    own["rms_norm_eps"] = next((epsilon for epsilon in epsilons if epsilon is not None), None)
    layers, predicting = own["num_hidden_layers"], metadata.get_model_int("nextn_predict_layers") or 0
    if isinstance(layers, int):
        own["num_hidden_layers"] = layers - predicting  # these layers are counted as blocks
    found: JsonObject = {
        key: value
        for key, value in own.items()
        if isinstance(value, bool) or (isinstance(value, int | float) and value)
    }
    if "scoring_func" in found:
        found["scoring_func"] = GATES.get(own["scoring_func"])
    return found


def _keys_of_other_meaning(config: JsonFields) -> set[str]:
    """Return the keys whose values llama.cpp's converter writes with another meaning than in config.json."""
    unlike = {"hidden_activation", "rope_scaling"}
    # The two may mean the size of dense blocks or of single experts, and some sizes are computed.
    if "num_experts" in config or "block_auto_adjust_ff_dim" in config:
        unlike |= {"intermediate_size"}
    if "kv_lora_rank" in config:  # attention with latent keys is stored as if it had one head
        unlike |= {"num_key_value_heads", "head_dim"}
    if config.keys() & {"global_head_dim", "per_layer_config"}:  # heads of layers with full attention are wider
        unlike |= {"head_dim"}
    if "alpha" in as_object(config.get("rope_scaling")):  # Hunyuan: the converter computes another base from it
        unlike |= {"rope_theta"}
    if config.get("num_nextn_predict_layers"):  # the converter counts these layers as blocks
        unlike |= {"num_hidden_layers"}
    return unlike


def _normalize_rope_scaling(rope: JsonFields) -> JsonObject | None:
    """Return rope_scaling with present key names and without empty keys.

    The result is empty if nothing is scaled, and None if each kind of layer has its own scaling.
    """
    if any(isinstance(value, dict) for value in rope.values()):  # one per kind of layer
        return None
    found = {NAMES.get(key, key): value for key, value in rope.items() if value is not None and key != "rope_theta"}
    return {} if found.get("rope_type", "default") == "default" else found


def _are_equal(one: object, other: object) -> bool:
    """Return True if two declared values mean the same."""
    if isinstance(one, list) and not isinstance(other, list):  # one value per layer
        return any(_are_equal(each, other) for each in one)
    if isinstance(one, str) and isinstance(other, str):
        return ALIKE.get(one, one) == ALIKE.get(other, other)
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return one == other or isclose(_as_float(one), _as_float(other), rel_tol=FLOAT32)
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_are_equal(one[key], other[key]) for key in one.keys() & other.keys()) and bool(one) == bool(other)
    return bool(one == other)


def _as_float(number: float) -> float:
    """Return a number as a float; infinity if it is too large."""
    try:
        return float(number)
    except OverflowError:
        return inf if number > 0 else -inf


def _report_difference(there: ModelFields, here: ModelFields, key: str) -> Finding:
    """Return the finding that the two sides declare ``key`` differently."""
    value, own = there.find(key), here.find(key)
    said = _show(value) if key in there.values and key in here.values else there.describe(key)
    message = f"{here.where} of the quantized checkpoint {here.describe(key)}, {there.where} of the original {said}"
    return make_finding("config_mismatch", "warning", None, message, REMEDY, key=key, original=value, quantized=own)


def _show(value: object) -> str:
    """Format a declared value for a message."""
    return display(f"{value:.9g}" if isinstance(value, float) else str(value), 200)


def _check_tied_head(
    there: ModelFields, here: ModelFields, original: Checkpoint, quantized: Checkpoint
) -> Iterator[Finding]:
    """Report a stored output layer that runtimes would ignore, or a declared one that is missing."""
    value, own = there.values.get(TIED), here.values.get(TIED)
    stored = any(name.startswith(HEADS) for name in quantized.entries)
    if (value, own) in ((True, False), (False, True)) and not (own is False and stored):
        yield _report_difference(there, here, TIED)
    elif value is None and own is True and stored and (head := _find_own_head(original)):
        message = (
            f"{here.where} of the quantized checkpoint declares {TIED}, {there.where} of the original does not, and "
            f"its {display(head)} is not its embedding: loaders of the quantized checkpoint ignore the output layer"
        )
        yield make_finding("config_mismatch", "warning", None, message, REMEDY, key=TIED, original=None, quantized=True)


def _find_own_head(checkpoint: Checkpoint) -> str | None:
    """Return the output layer if its first values are not those of the embedding; None if they may be tied."""
    tied = find_tied_head({TIED: True}, checkpoint.entries)
    if tied is None:
        return None
    head, embedding = (checkpoint.entries[name] for name in tied)
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return None
    n = min(SAMPLED, head.nbytes)
    first, other = (entry.file.read(entry.offset, n) for entry in (head, embedding))
    return None if first == other else tied.head


def _check_rope_scaling(there: ModelFields, here: ModelFields, quantized: Checkpoint) -> Iterator[Finding]:
    """Report a GGUF file whose rotary factors are missing although the original declares them, or the reverse."""
    if here.where != GGUF or there.where != CONFIG:
        return
    scaling, stored = there.values.get("rope_scaling"), ROTATED in quantized.entries
    if stored and scaling == {}:
        message = f"config.json of the original declares no rope_scaling, but the quantized checkpoint stores {ROTATED}"
        remedy = "convert the model again: runtimes would rotate by other frequencies"
        yield make_finding("config_mismatch", "warning", None, message, remedy, key="rope_scaling")
    rope = as_object(scaling)
    kind = str(rope.get("rope_type"))
    lacking = _find_lacking_factors(kind, rope.get("factor"), quantized)
    if lacking:
        message = f"config.json of the original declares rope_scaling {kind}, but the quantized checkpoint {lacking}"
        when = "beyond a few thousand tokens " if kind == "llama3" else ""
        remedy = f"convert the model again: {when}runtimes would rotate by other frequencies"
        yield make_finding("config_mismatch", "warning", None, message, remedy, key="rope_scaling")


def _find_lacking_factors(kind: str, factor: object, quantized: Checkpoint) -> str | None:
    """Return in words what a GGUF file lacks for a declared kind of rope_scaling; None if it lacks nothing."""
    needed = {"llama3": ROTATED, **dict.fromkeys(LONGROPE, SHORT)}.get(kind)
    if needed is not None:
        return None if needed in quantized.entries else f"stores no {needed}"
    if kind not in SCALED or factor in (None, 1, 1.0) or quantized.gguf is None:
        return None
    values, architecture = quantized.gguf.values, quantized.gguf.architecture
    if not any(f"{architecture}.{key}" in values for key in FACTORS):
        return f"lacks {architecture}.{FACTORS[0]}, so that llama.cpp scales nothing"
    name = f"{architecture}.rope.scaling.type"
    return None if kind == "linear" or name in values else f"lacks {name}, so that llama.cpp scales linearly"
