"""How programs call the same weights: prefixes, other words, fused and stacked projections. Data.

A name is taken apart into atoms, canonical names of projections of single experts:

    model.layers.3.self_attn.qkv_proj.weight         layers.3.self_attn.q_proj, …k_proj, …v_proj
    model.layers.3.mlp.experts.gate_up_proj [8, …]   layers.3.mlp.experts.0.gate_proj, ….0.up_proj, ….1.gate_proj, …

Two weights belong together where they hold the same atoms; fused against split is then a question of order.

Reference: transformers conversion_mapping.py; diffusers and nunchaku model definitions
(nunchaku models/transformers/transformer_flux_v2.py); vLLM model loaders.
"""

import re
from functools import lru_cache
from typing import NamedTuple

# Words of a path that say where a model is wrapped, not which weight it is.
WRAPPERS = frozenset(
    {
        "model",
        "language_model",
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "base_model",
        "backbone",
        "transformer",
        "base_layer",
        "diffusion_model",
        "unet",
        "net",
    }
)

# Whole paths, wrappers removed, without .weight or .bias: pattern, replacement. Applied in this order.
RENAMES = (
    # experts
    (r"(.*)\.block_sparse_moe\.(.*)", r"\1.mlp.\2"),
    (r"(.*)\.switch_mlp\.(.*)", r"\1.experts.\2"),
    (r"(.*\.experts(?:\.\d+)?)\.w1", r"\1.gate_proj"),
    (r"(.*\.experts(?:\.\d+)?)\.w3", r"\1.up_proj"),
    (r"(.*\.experts(?:\.\d+)?)\.w2(?:_weight)?", r"\1.down_proj"),
    (r"(.*\.experts)\.w13(?:_weight)?", r"\1.gate_up_proj"),
    # Granite
    (r"(.*)\.mlp\.input_linear", r"\1.mlp.experts.gate_up_proj"),
    (r"(.*)\.mlp\.output_linear", r"\1.mlp.experts.down_proj"),
    # Mistral's and Meta's own names; the order of q's and k's rows differs too (rotary.py)
    (r"(layers\.\d+)\.attention\.w([qkvo])", r"\1.self_attn.\2_proj"),
    (r"(layers\.\d+)\.feed_forward\.((?:experts\.\d+\.)?(?:gate|up|down)_proj|gate)", r"\1.mlp.\2"),
    (r"(layers\.\d+)\.feed_forward\.w1", r"\1.mlp.gate_proj"),
    (r"(layers\.\d+)\.feed_forward\.w2", r"\1.mlp.down_proj"),
    (r"(layers\.\d+)\.feed_forward\.w3", r"\1.mlp.up_proj"),
    (r"(layers\.\d+)\.attention_norm", r"\1.input_layernorm"),
    (r"(layers\.\d+)\.ffn_norm", r"\1.post_attention_layernorm"),
    (r"tok_embeddings", r"embed_tokens"),
    (r"output", r"lm_head"),
    # nunchaku's FLUX; "net" is gone as a wrapper
    (r"(transformer_blocks\.\d+)\.qkv_proj", r"\1.attn.to_qkv"),
    (r"(transformer_blocks\.\d+)\.qkv_proj_context", r"\1.attn.add_qkv_proj"),
    (r"(transformer_blocks\.\d+)\.out_proj", r"\1.attn.to_out.0"),
    (r"(transformer_blocks\.\d+)\.out_proj_context", r"\1.attn.to_add_out"),
    (r"(transformer_blocks\.\d+)\.mlp_fc1", r"\1.ff.0.proj"),
    (r"(transformer_blocks\.\d+)\.mlp_fc2", r"\1.ff.2"),
    (r"(transformer_blocks\.\d+)\.mlp_context_fc1", r"\1.ff_context.0.proj"),
    (r"(transformer_blocks\.\d+)\.mlp_context_fc2", r"\1.ff_context.2"),
    (r"((?:single_)?transformer_blocks\.\d+)\.(norm_(?:added_)?[qk])", r"\1.attn.\2"),
    (r"(single_transformer_blocks\.\d+)\.qkv_proj", r"\1.attn.to_qkv"),
    (r"(single_transformer_blocks\.\d+)\.attn\.to_out", r"\1.out_proj"),
    (r"(single_transformer_blocks\.\d+)\.mlp_fc1", r"\1.proj_mlp"),
)

# Last word of a path: what it holds, one after the other along the rows.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "upgate_proj": ("up_proj", "gate_proj"),  # QuIP#
}
HALVES = frozenset({"gate_up_proj", "upgate_proj"})  # fused of parts of one size

# Original's path: the paths whose columns lie side by side in it.
SIDE_BY_SIDE = ((r"(single_transformer_blocks\.\d+)\.proj_out", (r"\1.out_proj", r"\1.mlp_fc2")),)

# gpt-oss: rows of gate and up in turn in the fused weight, where all others have one below the other.
INTERLEAVED_GATE_UP = frozenset({"gpt_oss"})  # model_type of config.json

# Last word of a path: what MLX makes of it, a stack of heads each: the first part of a head's rows with
# inputs and outputs swapped, and the rest of them.
BY_HEAD = {"kv_b_proj": ("embed_q", "unembed_out")}

# Paths of the output layer, and of the embedding that stands for it where it is not stored (tied).
HEADS = frozenset({"lm_head", "output"})
COPIES = frozenset({"encoder.embed_tokens", "decoder.embed_tokens"})  # T5's, of shared
EMBEDDINGS = frozenset({"embed_tokens", "token_embd", "wte", "shared", "embedding.word_embeddings", "embeddings"})

# Last words of weights that some programs store as [in, out]: GPT-2's Conv1D; stacks of experts.
TURNED = frozenset({"c_attn", "c_proj", "c_fc", "gate_up_proj", "down_proj"})

# Last word of a norm's path, and the weights of the same block that it feeds: scales may be folded from these into it.
FED_BY_NORM = (
    ("input_layernorm", r"self_attn\.(q|k|v|qkv|q_a|kv_a)_proj(_with_mqa)?"),
    (
        "post_attention_layernorm|pre_feedforward_layernorm",
        r"mlp\.(gate|(shared_experts?\.|experts\.(\d+\.)?)?(gate|up|gate_up)_proj)",
    ),
)
# The same of a weight whose outputs are the inputs of another.
FED_BY_WEIGHT = (("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj"))

EXPERTS = "experts"

_RENAMES = tuple((re.compile(pattern), replacement) for pattern, replacement in RENAMES)
_SIDE_BY_SIDE = tuple((re.compile(pattern), parts) for pattern, parts in SIDE_BY_SIDE)


class Atoms(NamedTuple):
    """What a weight holds, in the order of its rows; ``even`` where all parts have as many rows."""

    names: tuple[str, ...]
    even: bool


def atoms_of(name: str, shape: tuple[int, ...]) -> Atoms:
    """The atoms of a weight of that name; 3-D weights of experts, and 2-D biases, are a stack of them."""
    path, kind = canonical(name)
    head, _, last = path.rpartition(".")
    words = FUSED.get(last, (last,))
    places = [head]
    if len(shape) == 3 - bool(kind) and (head == EXPERTS or head.endswith("." + EXPERTS)):
        places = [f"{head}.{expert}" for expert in range(shape[0])]
    names = tuple(f"{place}.{word}{kind}" for place in places for word in words)
    return Atoms(names, len(words) == 1 or last in HALVES)


def columns_of(name: str) -> tuple[str, ...]:
    """The atoms that lie side by side in a weight of that name; none, where it is no such weight."""
    path, kind = canonical(name)
    for pattern, parts in _SIDE_BY_SIDE:
        if found := pattern.fullmatch(path):
            return tuple(found.expand(part) + kind for part in parts)
    return ()


def in_halves(name: str) -> bool:
    """Whether a weight or bias of that name is fused of parts of one size."""
    return canonical(name)[0].rpartition(".")[2] in HALVES


def is_bias(name: str) -> bool:
    """Whether a name, or an atom, is that of a bias."""
    return canonical(name)[1] == ".bias"


def heads_of(name: str) -> tuple[str, ...]:
    """The two stacks of heads that MLX makes of a weight of that name; none, where it is no such weight."""
    path, kind = canonical(name)
    head, _, last = path.rpartition(".")
    return () if kind else tuple(f"{head}.{word}" for word in BY_HEAD.get(last, ()))


def may_be_turned(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight of that name and shape may be stored with inputs and outputs swapped."""
    path, _ = canonical(name)
    head, _, last = path.rpartition(".")
    return last in TURNED and (last.startswith("c_") or (len(shape) == 3 and head.endswith(EXPERTS)))


@lru_cache(maxsize=1 << 16)
def canonical(name: str) -> tuple[str, str]:
    """The path of a name without wrappers and in usual words, and its kind: "" for a weight, ".bias" and the like."""
    kind = ""
    for ending in (".weight", ".bias", "_bias"):
        if name.endswith(ending):
            name, kind = name.removesuffix(ending), "" if ending == ".weight" else ".bias"
            break
    path = ".".join(word for word in name.split(".") if word not in WRAPPERS)
    for pattern, replacement in _RENAMES:
        path = pattern.sub(replacement, path) if pattern.fullmatch(path) else path
    return path, kind
