"""Naming conventions of programs, as data: prefixes, synonyms, fused and stacked projections.

A name is split into atoms, the canonical names of the projections of single experts:

    model.layers.3.self_attn.qkv_proj.weight         layers.3.self_attn.q_proj, …k_proj, …v_proj
    model.layers.3.mlp.experts.gate_up_proj [8, …]   layers.3.mlp.experts.0.gate_proj, ….0.up_proj, ….1.gate_proj, …

Two weights match if they consist of the same atoms; fused and split weights differ only in the order of rows.

Reference: huggingface/transformers@5.23.0 conversion_mapping.py; diffusers and nunchaku model definitions (nunchaku
models/transformers/transformer_flux_v2.py); vLLM model loaders.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from quanterr.pairing.converters.orders import Order
from quanterr.selection.roles import unify_numbers

# Words of a path that come from wrappers of the model and say nothing about the weight.
WRAPPERS = frozenset(
    {
        "model",
        "language_model",
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
        "base_model",
        "backbone",
        "transformer",
        "base_layer",
        "diffusion_model",
        "unet",
        "net",
        "first_stage_model",
        "vae",
    }
)


@dataclass(frozen=True, slots=True)
class Convention:
    """How the names and layouts of one program's weights differ from Hugging Face's."""

    program: str
    # Pattern and replacement for whole paths, without wrappers, .weight and .bias; applied in the order of the table.
    renames: tuple[tuple[str, str], ...] = ()
    # Last word of a path → the projections that the weight holds, in the order of its rows.
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    equal_parts: frozenset[str] = frozenset()  # keys of ``fused`` whose projections have equally many rows
    # Pattern of an original's path → the paths whose columns it holds side by side.
    side_by_side: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # Last word of a path → two stacks of heads: the first rows of each head, transposed, and the other rows.
    by_head: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()  # last words of weights that may be stored as [in, out]
    # Pattern of q and k names whose rows are in RoPE pairs, (0, d/2), (1, d/2 + 1), …, instead of halves of each head.
    row_pairs: str = ""


CONVENTIONS = (
    Convention(
        "ONNX Runtime GenAI",
        renames=(
            (r"(layers\.\d+)\.attn\.((?:q|k|v|o|qkv)_proj)", r"\1.self_attn.\2"),
            (r"(layers\.\d+)\.attn\.([qk]_norm)\.layernorm", r"\1.self_attn.\2"),
            (r"layers\.\d+\.final_norm_layernorm", r"norm"),
            (r"(layers\.\d+)\.moe\.(router|gate|experts\..*)", r"\1.mlp.\2"),
            (r"(layers\.\d+)\.moe\.weight_([123])", r"\1.mlp.experts.w\2"),
        ),
    ),
    Convention(
        "transformers, vLLM",
        renames=(
            (r"(.*)\.block_sparse_moe\.(.*)", r"\1.mlp.\2"),
            (r"(.*)\.switch_mlp\.(.*)", r"\1.experts.\2"),
            (r"(layers\.\d+)\.ffn\.(experts\..*)", r"\1.mlp.\2"),
            (r"(.*\.experts(?:\.\d+)?)\.w1", r"\1.gate_proj"),
            (r"(.*\.experts(?:\.\d+)?)\.w3", r"\1.up_proj"),
            (r"(.*\.experts(?:\.\d+)?)\.w2(?:_weight)?", r"\1.down_proj"),
            (r"(.*\.experts)\.w13(?:_weight)?", r"\1.gate_up_proj"),
        ),
        fused={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "Wqkv": ("q_proj", "k_proj", "v_proj"),
            "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
            "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        equal_parts=frozenset({"gate_up_proj"}),
        transposed=frozenset({"gate_up_proj", "down_proj"}),  # stacks of experts are transposed
    ),
    Convention("GPT-2", transposed=frozenset({"c_attn", "c_proj", "c_fc"})),
    Convention(
        "Granite",
        renames=(
            (r"(.*)\.mlp\.input_linear", r"\1.mlp.experts.gate_up_proj"),
            (r"(.*)\.mlp\.output_linear", r"\1.mlp.experts.down_proj"),
            (r"(.*)\.shared_mlp\.input_linear", r"\1.shared_mlp.gate_up_proj"),
            (r"(.*)\.shared_mlp\.output_linear", r"\1.shared_mlp.down_proj"),
        ),
    ),
    Convention(
        "Mistral, Meta",
        renames=(
            (r"(layers\.\d+)\.attention\.w([qkvo])", r"\1.self_attn.\2_proj"),
            (
                r"(layers\.\d+)\.feed_forward\.((?:experts\.(?:\d+\.)?)?(?:gate_up|gate|up|down)_proj|gate)",
                r"\1.mlp.\2",
            ),
            (r"(layers\.\d+)\.feed_forward\.w1", r"\1.mlp.gate_proj"),
            (r"(layers\.\d+)\.feed_forward\.w2", r"\1.mlp.down_proj"),
            (r"(layers\.\d+)\.feed_forward\.w3", r"\1.mlp.up_proj"),
            (r"(layers\.\d+)\.attention_norm", r"\1.input_layernorm"),
            (r"(layers\.\d+)\.ffn_norm", r"\1.post_attention_layernorm"),
            (r"tok_embeddings", r"embed_tokens"),
            (r"output", r"lm_head"),
        ),
        row_pairs=r"(?:.*\.)?layers\.\d+\.attention\.w([qk])(?:\..*)?",
    ),
    Convention(
        "diffusers",
        fused={"to_qkv": ("to_q", "to_k", "to_v"), "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")},
    ),
    Convention(
        "nunchaku",  # FLUX; the wrapper "net" is already removed
        renames=(
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
        ),
        side_by_side=((r"(single_transformer_blocks\.\d+)\.proj_out", (r"\1.out_proj", r"\1.mlp_fc2")),),
    ),
    Convention(
        "MLX, llama.cpp",
        renames=(
            (r"(.*)\.embed_q", r"\1.k_b_proj"),
            (r"(.*)\.unembed_out", r"\1.v_b_proj"),
            (r"(.*\.experts)\.switch_glu\.(.*)", r"\1.\2"),
            (r"(.*\.experts)\.fc1", r"\1.up_proj"),
            (r"(.*\.experts)\.fc2", r"\1.down_proj"),
            (r"(.*)\.([qkv])_conv\.conv", r"\1.\2_conv1d"),
            (r"(.*\.mlp)\.e_score_correction", r"\1.gate.e_score_correction"),
            (r"gpt_neox\.(.*)", r"\1"),
            (r"h\.(\d+\.(?:attention\.(?:query_key_value|dense)|(?:input|post_attention)_layernorm))", r"layers.\1"),
            (r"h\.(\d+\.mlp\.dense_(?:h_to_4h|4h_to_h))", r"layers.\1"),
        ),
        by_head={"kv_b_proj": ("k_b_proj", "v_b_proj")},
    ),
    Convention(
        "torch's normalized weights",  # parametrizations.weight_norm and, until torch 2.0, weight_norm
        renames=(
            (r"(.*)\.parametrizations\.weight\.original0", r"\1.weight_g"),
            (r"(.*)\.parametrizations\.weight\.original1", r"\1.weight_v"),
        ),
    ),
    Convention("QuIP#", fused={"upgate_proj": ("up_proj", "gate_proj")}, equal_parts=frozenset({"upgate_proj"})),
)

# Paths of the output layer, and of the embedding that replaces it if they are tied.
HEADS = frozenset({"lm_head", "output"})
EMBEDDINGS = frozenset({"embed_tokens", "token_embd", "wte", "shared", "embedding.word_embeddings", "embeddings"})

# Patterns of a norm's last word, and of the weights in its block that it feeds: their scales may be folded into it.
_ATTENTION = r"(self_attn|self_attention|attn)\."
FED_BY_NORM = (
    (
        "input_layernorm|self_attn_layer_norm|ln_1|ln_attn",
        _ATTENTION + r"((q|k|v|qkv|q_a|kv_a)_proj(_with_mqa)?|query_key_value|c_attn)",
    ),
    (
        "post_attention_layernorm|pre_feedforward_layernorm|final_layer_norm|ln_2|ln_mlp",
        r"mlp\.(gate|(shared_experts?\.|experts\.(\d+\.)?)?(gate|up|gate_up)_proj|c_fc|dense_h_to_4h)|fc1",
    ),
    ("q_a_layernorm", "q_b_proj"),
    ("kv_a_layernorm", "kv_b_proj"),
)
# Last word of a weight → possible last words of the weight that it feeds; fused weights feed it by their last rows.
FED_BY_WEIGHT = {
    "up_proj": ("down_proj",),
    "gate_up_proj": ("down_proj",),
    "v_proj": ("o_proj", "out_proj"),
    "qkv_proj": ("o_proj", "out_proj"),
    "fc1": ("fc2",),
}

EXPERTS = "experts"

_RENAMES = tuple((re.compile(pattern), replacement) for row in CONVENTIONS for pattern, replacement in row.renames)
_SIDE_BY_SIDE = tuple((re.compile(pattern), parts) for row in CONVENTIONS for pattern, parts in row.side_by_side)
_FUSED = {word: parts for row in CONVENTIONS for word, parts in row.fused.items()}
_BY_HEAD = {word: parts for row in CONVENTIONS for word, parts in row.by_head.items()}
_EQUAL_PARTS = frozenset().union(*(row.equal_parts for row in CONVENTIONS))
_TRANSPOSED = frozenset().union(*(row.transposed for row in CONVENTIONS))


class Atoms(NamedTuple):
    """The atoms of a weight: canonical names of the projections of single experts that it holds."""

    names: tuple[str, ...]  # ordered as the weight's rows, or along ``axis``
    equal: bool = True  # whether all atoms have equally many rows
    axis: Literal["rows", "columns", "heads"] = "rows"
    order: Order | None = None  # order in which the stacked rows of the atoms are stored

    @property
    def are_biases(self) -> bool:
        """True if the atoms are parts of a bias."""
        return self.names[0].endswith(".bias")


def atoms_of(name: str, shape: tuple[int, ...]) -> Atoms:
    """Return the atoms of a weight along its rows; 3-D expert weights and 2-D expert biases are stacks of experts."""
    path, ending = canonicalize(name)
    head, _, last = path.rpartition(".")
    words = _FUSED.get(last, (last,))
    places = [head]
    if len(shape) == 3 - bool(ending) and (head == EXPERTS or head.endswith("." + EXPERTS)):
        places = [f"{head}.{expert}" for expert in range(shape[0])]
    names = tuple(f"{place}.{word}{ending}" for place in places for word in words)
    return Atoms(names, len(words) == 1 or last in _EQUAL_PARTS)


def find_other_arrangements(name: str) -> Iterator[Atoms]:
    """Yield ways to split a weight other than along its rows: by columns, or into parts of each head."""
    path, ending = canonicalize(name)
    head, _, last = path.rpartition(".")
    for pattern, parts in _SIDE_BY_SIDE:
        if match := pattern.fullmatch(path):
            yield Atoms(tuple(match.expand(part) + ending for part in parts), axis="columns")
    if not ending and last in _BY_HEAD:
        yield Atoms(tuple(f"{head}.{word}" for word in _BY_HEAD[last]), axis="heads")


def has_equal_parts(name: str) -> bool:
    """Return whether a weight or bias is fused from parts with equally many rows."""
    return canonicalize(name)[0].rpartition(".")[2] in _EQUAL_PARTS


def may_be_transposed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight may be stored with inputs and outputs swapped."""
    path, _ = canonicalize(name)
    head, _, last = path.rpartition(".")
    stacked = len(shape) == 3 and head.endswith(EXPERTS)
    return last in _TRANSPOSED and (last.startswith("c_") or stacked)


@lru_cache(maxsize=1 << 16)
def canonicalize(name: str) -> tuple[str, str]:
    """Split a name into its path, without wrappers and in Hugging Face's words, and ``""`` or ``".bias"``."""
    bias_ending = ""
    for ending in (".weight", ".bias", "_bias"):
        if name.endswith(ending):
            name, bias_ending = name.removesuffix(ending), "" if ending == ".weight" else ".bias"
            break
    path = ".".join([word for word in name.split(".") if word not in WRAPPERS])
    for pattern, replacement in _find_renames(unify_numbers(path)):
        path = pattern.sub(replacement, path)
    return path, bias_ending


@lru_cache(maxsize=1 << 12)  # cached, as all blocks have the same paths
def _find_renames(path: str) -> list[tuple[re.Pattern[str], str]]:
    """Return the renames that apply to a path, in order; which apply does not depend on numbers in the path."""
    renames = []
    for pattern, replacement in _RENAMES:
        if pattern.fullmatch(path):
            path = pattern.sub(replacement, path)
            renames.append((pattern, replacement))
    return renames
