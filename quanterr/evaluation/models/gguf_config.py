"""The config.json of a language model, derived from the metadata and the tensors of its GGUF file.

    FAMILIES    architecture of the file → model of transformers, and the field of config.json that each key stands for
    IGNORED     keys that change nothing in the outputs

Fields that llama.cpp derives from the architecture alone, whatever a file states, are ``fixed``. A file with a key that
is in no table is refused, as the key may change what the model computes.

Reference: ggml-org/llama.cpp (in llama-cpp-python 0.3.36) conversion/*.py, set_gguf_parameters of each model;
src/models/*.cpp, load_arch_hparams.
"""

from collections.abc import Callable, Mapping
from math import isclose, pi, prod
from struct import pack, unpack
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.gguf_metadata import Scalar, Value
from quanterr.errors import CheckpointError
from quanterr.pairing.converters.llama_cpp import DERIVED
from quanterr.tensors.workspace import read_entry
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, itemize

INSTEAD = "give the original's config.json and tokenizer with --config FOLDER"

# Key, without the architecture before it → field of config.json.
KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERTS |= {"expert_feed_forward_length": "moe_intermediate_size"}
OPTIONAL = frozenset(["attention.head_count_kv", "attention.key_length", "final_logit_softcapping"])
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
LINEAR = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}
SLIDING_WINDOW = {"attention.sliding_window": "sliding_window"}
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
IGNORED = frozenset(["vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"])
MAX_NUMBER = 1 << 26  # no model has more blocks, elements or tokens
# Keys that do not change what the model computes if they have this value.
KEYS_WITHOUT_EFFECT: Mapping[str, Value] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "nextn_predict_layers": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
}


class Facts:
    """What a file states about its model, and which keys have been read, as all that have an effect must be."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, Value]) -> None:
        """Keep the keys of the architecture, and the headers of the tensors."""
        self.checkpoint, self.where = checkpoint, display(checkpoint.path)
        self.architecture = str(values.get("general.architecture"))
        self._start = f"{self.architecture}."
        self._values = {
            key.removeprefix(self._start): value for key, value in values.items() if key.startswith(self._start)
        }
        self.shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
        self._read: set[str] = set()

    def get(self, key: str) -> Scalar | None:
        """Return the value of a key; None if the file lacks it.

        Raises:
            CheckpointError: the values for the blocks differ, or the value is larger than that of any model.
        """
        self._read.add(key)
        value = self._values.get(key)
        if isinstance(value, tuple):
            if len(set(value)) != 1:
                raise self.refusal(f"{self._start}{key} differs from block to block, {list(value[:4])} …")
            value = value[0]
        if isinstance(value, int) and value > MAX_NUMBER:
            raise self.refusal(f"{self._start}{key} is {value:,}, which no model has")
        return _find_shortest_decimal(value) if isinstance(value, float) else value

    def each(self, key: str) -> tuple[Scalar, ...]:
        """Return all values of a key; none if the file lacks it."""
        self._read.add(key)
        value = self._values.get(key, ())
        return value if isinstance(value, tuple) else (value,)

    def need(self, key: str) -> Scalar:
        """Return the value of a key.

        Raises:
            CheckpointError: the file has none.
        """
        value = self.get(key)
        if value is None:
            raise self.refusal(f"{self._start}{key} is missing")
        return value

    def count(self, key: str) -> int:
        """Return the whole number under a key that the file must have.

        Raises:
            CheckpointError: the key is missing, or its value is not a positive whole number.
        """
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(f"{self._start}{key} is {display(str(value))}, not a positive whole number")
        return value

    def check_blocks(self) -> None:
        """Check, before a model is built, that the tensors belong to as many blocks as the metadata states.

        Raises:
            CheckpointError: the numbers of blocks differ.
        """
        stated = self.count("block_count")
        blocks = len({name.split(".")[1] for name in self.shapes if name.startswith("blk.")})
        if stated != blocks:
            raise self.refusal(f"{self._start}block_count is {stated:,}, but tensors are in {count(blocks, 'block')}")

    def numbers(self, name: str) -> list[float] | None:
        """Return the elements of a small tensor of floats; None if the file lacks it."""
        entry = self.checkpoint.entries.get(name)
        self._read.add(name)
        if entry is None:
            return None
        if entry.dtype != "F32":
            raise self.refusal(f"{display(name)} is {entry.dtype}, F32 is expected")
        values: list[float] = read_entry(entry).flatten().tolist()
        return [_find_shortest_decimal(value) for value in values]

    def check_all_read(self) -> None:
        """Check that every key that may change the model's outputs was read.

        Raises:
            CheckpointError: a key is not understood.
        """
        left = {key: value for key, value in self._values.items() if key not in self._read | IGNORED}
        if unknown := [
            key for key, value in left.items() if key not in KEYS_WITHOUT_EFFECT or KEYS_WITHOUT_EFFECT[key] != value
        ]:
            shown = itemize([f"{self._start}{key}" for key in unknown], 3)
            raise self.refusal(f"{shown} may change what the model computes, and quanterr does not know how")
        derived = sorted(name for name in self.shapes if name.removesuffix(".weight") in DERIVED)
        if unknown := [name for name in derived if name not in self._read]:
            raise self.refusal(f"{itemize(unknown, 3)} changes what the model computes, and quanterr does not know how")

    def refusal(self, reason: str) -> CheckpointError:
        """Return an error that says why no config can be derived from the file."""
        return CheckpointError(f"{self.where}: {reason}; {INSTEAD}")


class Family(NamedTuple):
    """A model of transformers, and how its config is derived from a file."""

    model_type: str
    architecture: str  # class of transformers
    keys: Mapping[str, str]  # field by key, in addition to KEYS
    more: Callable[[Facts], JsonObject]  # computes the other fields
    fixed: Mapping[str, object] = {}  # fields that follow from the architecture, whatever the file states
    without: frozenset[str] = frozenset()  # the KEYS that its files lack


def config_of(checkpoint: Checkpoint, values: Mapping[str, Value]) -> JsonObject:
    """Return the config.json of a GGUF file's model; ``values`` are all its keys.

    Raises:
        CheckpointError: the architecture is in no table, or the file states something unknown about its model.
    """
    facts = Facts(checkpoint, values)
    family = find_family(facts)
    facts.check_blocks()
    config: JsonObject = {"model_type": family.model_type, "architectures": [family.architecture], **family.fixed}
    for key, field in ({key: KEYS[key] for key in KEYS if key not in family.without} | dict(family.keys)).items():
        value = facts.get(key) if key in OPTIONAL else facts.need(key)
        if value is not None:
            config[field] = value
    config["vocab_size"] = _count_rows(facts, "token_embd.weight")
    config["tie_word_embeddings"] = "output.weight" not in facts.shapes
    config |= {field: values.get(f"tokenizer.ggml.{key}") for key, field in TOKENS.items()}
    config |= family.more(facts)
    facts.check_all_read()
    return config


def find_family(facts: Facts) -> Family:
    """Return the family of a file.

    Raises:
        CheckpointError: its architecture is in no table.
    """
    name = facts.architecture
    if name == "llama" and facts.get("expert_count"):
        return MIXTRAL
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise facts.refusal(
            f"no config follows from the metadata of the architecture {display(name)} yet; quanterr knows {known}"
        )
    return FAMILIES[name]


def _decoder(facts: Facts) -> JsonObject:
    """Return the fields for heads, biases and rotary embeddings of a usual decoder."""
    return _heads(facts) | {"rope_parameters": _rope(facts)}


def _heads(facts: Facts) -> JsonObject:
    """Return the size of heads and the number of key heads, which a file may leave out.

    Raises:
        CheckpointError: keys and values have different sizes.
    """
    heads = facts.count("attention.head_count")
    size = facts.get("attention.key_length") or facts.count("embedding_length") // heads
    of_values = facts.get("attention.value_length")
    if of_values not in (None, size):
        raise facts.refusal(f"heads of keys have {size} elements, those of values {of_values}")
    return {"head_dim": size, "num_key_value_heads": facts.get("attention.head_count_kv") or heads}


def _llama(facts: Facts) -> JsonObject:
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return _decoder(facts) | {field: name in facts.shapes for field, name in biases.items()}


def _qwen3(facts: Facts) -> JsonObject:
    return _decoder(facts) | {"attention_bias": "blk.0.attn_q.bias" in facts.shapes}


def _mixtral(facts: Facts) -> JsonObject:
    return _decoder(facts) | {"sliding_window": None}


def _gemma2(facts: Facts) -> JsonObject:
    blocks = facts.count("block_count")
    return _decoder(facts) | _gemma_scale(facts, 46) | {"layer_types": _list_attention_types(blocks, 2)}


def _gemma3(facts: Facts) -> JsonObject:
    blocks, window = facts.count("block_count"), facts.get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base_swa") or 10_000.0}
    full = _rope(facts)
    return (
        _heads(facts)
        | _gemma_scale(facts, 62)
        | {"sliding_window": window or 4096, "layer_types": _list_attention_types(blocks, 6 if window else 1)}
        | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
        | {"final_logit_softcapping": facts.get("final_logit_softcapping") or None}
    )


def _gemma_scale(facts: Facts, blocks_of_27b: int) -> JsonObject:
    """Return the number by whose square root attention scores are divided: the head size, except in Gemma's 27B."""
    size = _heads(facts)["head_dim"]
    if facts.count("block_count") == blocks_of_27b:
        size = facts.count("embedding_length") // facts.count("attention.head_count")
    return {"query_pre_attn_scalar": size}


def _list_attention_types(blocks: int, period: int) -> list[str]:
    """Return the attention of each block: full in the last block of each period, sliding in the others."""
    return ["sliding_attention" if (n + 1) % period else "full_attention" for n in range(blocks)]


def _qwen35(facts: Facts) -> JsonObject:
    """Return the sizes of linear attention; blocks for multi-token prediction are not counted."""
    blocks = facts.count("block_count") - int(facts.get("nextn_predict_layers") or 0)
    interval, values = facts.count("full_attention_interval"), facts.count("ssm.time_step_rank")
    linear = facts.each("attention.recurrent_layers") or tuple((n + 1) % interval > 0 for n in range(blocks))
    sections = [section for section in facts.each("rope.dimension_sections") if section]
    rope = _rope(facts, partial=True) | {"mrope_section": sections, "mrope_interleaved": True}
    return _heads(facts) | {
        "num_hidden_layers": blocks,
        "layer_types": ["linear_attention" if is_linear else "full_attention" for is_linear in linear[:blocks]],
        "linear_num_value_heads": values,
        "linear_value_head_dim": facts.count("ssm.inner_size") // values,
        "rope_parameters": rope,
    }


def _qwen35moe(facts: Facts) -> JsonObject:
    facts.get("feed_forward_length")  # read, but ignored: every block has experts, which have another size
    return _qwen35(facts)


def _phi3(facts: Facts) -> JsonObject:
    rope = _rope(facts, partial=True)
    original = facts.get("rope.scaling.original_context_length") or facts.count("context_length")
    short, long = facts.numbers(SHORT), facts.numbers(LONG)
    factor = facts.get("rope.scaling.attn_factor")
    if short is not None and long is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope |= {"original_max_position_embeddings": original}
        rope |= {} if factor is None else {"attention_factor": factor}
    elif factor not in (None, 1.0):
        raise facts.refusal(f"{facts.architecture}.rope.scaling.attn_factor is {factor} without {SHORT} and {LONG}")
    heads = {key: value for key, value in _heads(facts).items() if key != "head_dim"}
    window = {"sliding_window": facts.get("attention.sliding_window") or None}
    # Depending on its version, transformers reads the rotated part of a head from one of two fields.
    part = {"partial_rotary_factor": rope["partial_rotary_factor"]}
    return heads | window | part | {"rope_parameters": rope, "original_max_position_embeddings": original}


def _bert(facts: Facts) -> JsonObject:
    """Return the sizes of a BERT, in which each token attends to all tokens.

    Raises:
        CheckpointError: the metadata declares causal attention.
    """
    if facts.get("attention.causal") is not False:
        raise facts.refusal("bert.attention.causal is not false")
    return {
        "type_vocab_size": _count_rows(facts, "token_types.weight"),
        "max_position_embeddings": _count_rows(facts, "position_embd.weight"),
    }


def _rope(facts: Facts, partial: bool = False) -> JsonObject:
    """Return rope_parameters; with ``partial``, a part of each head may be rotated.

    Raises:
        CheckpointError: the scaling is unknown, or a part of each head is rotated.
    """
    rope: JsonObject = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base") or 10_000.0}
    size, rotated = _heads(facts)["head_dim"], facts.get("rope.dimension_count")
    if partial:
        if isinstance(rotated, int) and (rotated % 2 or not 0 < rotated <= size):
            raise facts.refusal(f"{facts.architecture}.rope.dimension_count is {rotated}, but heads are {size} long")
        rope["partial_rotary_factor"] = (rotated or size) / size
    elif rotated not in (None, size):
        raise facts.refusal(f"{facts.architecture}.rope.dimension_count is {rotated}, but heads are {size} long")
    scaling_type, factor = facts.get("rope.scaling.type"), facts.get("rope.scaling.factor") or 1.0
    facts.get("rope.scaling.original_context_length")  # changes nothing without a scaling that uses it
    factors = facts.numbers(FACTORS)
    if factors is not None:
        if scaling_type not in (None, "none"):
            raise facts.refusal(f"{FACTORS} is stored, but rotations are also scaled as {display(str(scaling_type))}")
        return rope | (_find_llama3(rope["rope_theta"], factors) or _scale_each(facts, factors))
    if scaling_type == "yarn":
        given = {field: facts.get(key) for key, field in YARN.items()}
        context = facts.need("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        return rope | {field: value for field, value in given.items() if value is not None}
    if scaling_type in (None, "linear"):
        return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}
    if scaling_type == "none" or (scaling_type == "longrope" and partial):
        return rope
    raise facts.refusal(f"rotations are scaled as {display(str(scaling_type))}")


def _find_llama3(base: float, factors: list[float]) -> JsonObject | None:
    """Return the parameters of llama3's scaling from which the converter made these factors; None if it did not."""
    scaling = {"factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for context in (2**n for n in range(5, 21)):
        made = [_llama3_factor(base ** (n / len(factors)), context, max(factors)) for n in range(len(factors))]
        if all(isclose(computed, stored, rel_tol=1e-5) for computed, stored in zip(made, factors, strict=True)):
            return {"rope_type": "llama3", "original_max_position_embeddings": context, **scaling}
    return None


def _llama3_factor(wave: float, context: int, factor: float) -> float:
    """Return the factor for a wavelength of 2π · ``wave``: 1 for short wavelengths, ``factor`` for long ones."""
    share = context / (2 * pi * wave)
    smooth = (min(max(share, 1.0), 4.0) - 1.0) / 3.0
    return 1 / ((1 - smooth) / factor + smooth)


def _scale_each(facts: Facts, factors: list[float]) -> JsonObject:
    """Return the scaling of rotations by a factor for each pair of elements, at any length of text."""
    context = facts.count("context_length")
    scaled = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": context, **scaled}


def _count_rows(facts: Facts, name: str) -> int:
    """Return the number of rows of a tensor that the file must have."""
    shape = facts.shapes.get(name)
    if shape is None or len(shape) != 2 or not prod(shape):
        raise facts.refusal(f"{name} is {'missing' if shape is None else f'a tensor of shape {list(shape)}'}")
    return shape[0]


def _find_shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to a float32, which is the number in the original's config.json."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if unpack("<f", pack("<f", short))[0] == value:
                return short
        except OverflowError:  # rounding up exceeded the largest float32
            continue
    return value


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", {}, _llama),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", {}, _decoder),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        EXPERTS | SHARED,
        _decoder,
        {"norm_topk_prob": False},
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {}, _qwen3),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS, _qwen3, {"norm_topk_prob": True}),
    "qwen35": Family("qwen3_5_text", "Qwen3_5ForCausalLM", LINEAR, _qwen35),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        LINEAR | EXPERTS | SHARED,
        _qwen35moe,
        without=frozenset({"feed_forward_length"}),
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", {}, _decoder),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        SLIDING_WINDOW
        | {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        _gemma2,
    ),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", {}, _gemma3),
    "phi3": Family("phi3", "Phi3ForCausalLM", {}, _phi3, without=frozenset({"attention.key_length"})),
    "bert": Family(
        "bert",
        "BertModel",
        {"attention.layer_norm_epsilon": "layer_norm_eps"},
        _bert,
        {"add_pooling_layer": False},
        without=frozenset(["attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"]),
    ),
}
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    _mixtral,
)
