"""What llama.cpp's converter changes in tensors besides their names, by architecture of the GGUF file.

    PIECES       tensors of a GGUF file that hold several of the original, from top to bottom
    STACKS       tensors that hold one matrix or vector of the original for each number in its name
    ORDERS       rows and columns in another order
    NUMBERS      values that the converter changes
    DERIVED      tensors that the converter computes from the configuration

llama.cpp computes as the architecture prescribes without looking at the values, so a tensor that lacks such a change
gives wrong results. Changes of shape need no table: axes of length 1 are dropped or added, vectors are cut into rows.

Reference: ggml-org/llama.cpp conversion/*.py (in llama-cpp-python 0.3.36), modify_tensors and filter_tensors of each
model; convert_hf_to_gguf.py --fuse-gate-up-exps, --fuse-qkv.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from math import gcd, prod
from typing import NamedTuple, TypeVar

from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.pairing.converters.numbers import (
    Added,
    Change,
    Exponential,
    NegatedExponential,
    SoftPlus,
    always,
    multiply,
    multiply_mamba_inputs,
)
from quanterr.pairing.converters.orders import Order, grid, join_orders, repeat_order
from quanterr.tensors.chunks import as_matrix
from quanterr.util.strict_json import JsonFields

PIECES: Mapping[str, tuple[str, ...]] = {
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
}
STACKS = re.compile(r".*_exps|altup_proj|altup_unembd_proj")
HEAD_NORMS = frozenset({"attn_q_norm", "attn_k_norm"})  # stacked if they have a row for each head (StableLM)
# Architectures whose embedding has only the rows of the tokenizer's tokens.
CROPPED = frozenset({"gemma3", "gemma-embedding"})
POSITIONS = "position_embd"  # lacks the original's first rows if these belong to no position (RoBERTa)
DERIVED = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})

# Tensors that gguf's own tables of names lack: path in the original → name, with the number of the block as {bid}. The
# first name that a file has counts.
EVERYWHERE: Mapping[str, tuple[str, ...]] = {
    "layers.{bid}.eh_proj": ("blk.{bid}.nextn.eh_proj",),
    "layers.{bid}.embed_tokens": ("blk.{bid}.nextn.embed_tokens",),
    "layers.{bid}.enorm": ("blk.{bid}.nextn.enorm",),
    "layers.{bid}.hnorm": ("blk.{bid}.nextn.hnorm",),
    "layers.{bid}.shared_head.head": ("blk.{bid}.nextn.shared_head_head",),
    "layers.{bid}.shared_head.norm": ("blk.{bid}.nextn.shared_head_norm",),
    "layers.{bid}.shared_mlp.gate_proj": ("blk.{bid}.ffn_gate_shexp", "blk.{bid}.ffn_gate"),
    "layers.{bid}.shared_mlp.up_proj": ("blk.{bid}.ffn_up_shexp", "blk.{bid}.ffn_up"),
    "layers.{bid}.shared_mlp.down_proj": ("blk.{bid}.ffn_down_shexp", "blk.{bid}.ffn_down"),
    "layers.{bid}.mixer.experts.up_proj": ("blk.{bid}.ffn_up_exps",),
    "layers.{bid}.mixer.experts.down_proj": ("blk.{bid}.ffn_down_exps",),
}
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "falcon-h1": {"layers.{bid}.pre_ff_layernorm": ("blk.{bid}.ffn_norm",)},
    "gemma4": {
        "layers.{bid}.router.scale": ("blk.{bid}.ffn_gate_inp.scale",),
        "layers.{bid}.router.per_expert_scale": ("blk.{bid}.ffn_down_exps.scale",),
    },
    # Modules of sentence-transformers, which the converter takes along with --sentence-transformers-dense-modules.
    "gemma-embedding": {"2_Dense.linear": ("dense_2",), "3_Dense.linear": ("dense_3",)},
    "clip": {
        "vision_tower.vision_model.encoder.layers.{bid}.attn.qkv": ("v.blk.{bid}.attn_qkv",),
        "audio_tower.conv1": ("a.conv1d.1",),
        "audio_tower.conv2": ("a.conv1d.2",),
        "conformer.subsample_conv_projection.layer0.conv": ("a.conv1d.0",),
        "conformer.subsample_conv_projection.layer1.conv": ("a.conv1d.1",),
        "conformer.subsample_conv_projection.layer0.norm": ("a.conv1d.0.norm",),
        "conformer.subsample_conv_projection.layer1.norm": ("a.conv1d.1.norm",),
        "multi_modal_projector.linear": ("mm.a.fc",),
        "multi_modal_projector.linear_1": ("mm.1", "mm.a.mlp.1", "mm.model.mlp.1"),
        "multi_modal_projector.linear_2": ("mm.2", "mm.a.mlp.2", "mm.model.mlp.3"),
        "multi_modal_projector.layer_norm": ("mm.input_norm", "mm.model.mlp.0"),
        "multi_modal_projector.mm_input_projection_weight": ("mm.input_projection",),
        "visual.merger.linear_fc1": ("mm.0",),
        "visual.merger.linear_fc2": ("mm.2",),
        "visual.merger.norm": ("v.post_ln",),
    },
}
# Paths of towers that the converter renames before it looks them up.
RENAMED: Mapping[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "clip": (
        (re.compile(r"(.*)\.linear"), r"\1"),
        (re.compile(r"audio_tower\.(.*)"), r"conformer.\1"),
        (re.compile(r"vision_model\.(.*)"), r"vision_tower.vision_model.\1"),
        (re.compile(r"vision_tower\.encoder\.(.*)"), r"vision_model.\1"),
        (re.compile(r"vision_tower\.((?:embeddings|pre_layrnorm)\b.*)"), r"vision_tower.vision_model.\1"),
    )
}
LIMITS = re.compile(r"(.*)(\.(?:in|out)put_(?:min|max))")  # limits of a layer's activations
MERGERS = re.compile(r"(.*\.deepstack_merger_list\.)(\d+)(\..*)")
MERGED_BLOCKS = "clip.vision.is_deepstack_layers"  # tells for each block whether a merger follows it
# Tensors of towers and projectors, by their name in the original: the converter writes them to a file of their own.
TOWERS = re.compile(
    r"(mlp|vit\.|vpm\.|siglip2\.|conformer\.|merger\.|resampler\.|sound_encoder\.|sound_projection\.|speech_embeddings\.).*"
    r"|.*(visual\.|vision\.|audio\.|talker\.|vision_|audio_|token2wav\.|code2wav\.|projector\.|pre_mm_projector_norm|"
    r"image_newline|view_seperator|patch_embed|patch_merger\.|patch_merge_mlp\.|model\.connector\.).*"
)
# GGUF files of encoders lack the layers after the last block, as the model's embeddings do not need them.
ENCODERS = frozenset({"bert", "nomic-bert", "nomic-bert-moe", "modern-bert", "jina-bert-v2", "jina-bert-v3"})
LEFT_OUT = re.compile(
    r"(.*\.)?(pooler\.dense|cls\.predictions|cls\.seq_relationship|position_ids|mlp\.experts\.bias).*"
)
# Layers for multi-token prediction follow the last block: path in the original → path in their block.
PREDICTION = (
    (re.compile(r"mtp\.layers\.(\d+)\.(.*)"), r"\2"),
    (re.compile(r"mtp\.fc"), "eh_proj"),
    (re.compile(r"mtp\.pre_fc_norm_embedding"), "enorm"),
    (re.compile(r"mtp\.pre_fc_norm_hidden"), "hnorm"),
    (re.compile(r"mtp\.norm"), "shared_head.norm"),
)
# Architectures whose original has the rows of all experts in one matrix, and the columns of ffn_down's as rows.
FLAT = frozenset({"dbrx", "nomic-bert-moe"})
PATCH = "v.patch_embd"
PATCHES = "v.patch_embd.weight", "v.patch_embd.weight.1"  # kernels of two frames, which are one in the original
PIXELS_FIRST = frozenset({"gemma4v", "lfm2"})  # projectors whose original stores a patch as [h × w × channels]
# Weights of experts in NVFP4 whose scales hold a further factor for each expert: word → path in the original's block.
FOLDED: Mapping[str, Mapping[str, str]] = {"gemma4": {"ffn_down_exps": "router.per_expert_scale"}}

PAIRED = frozenset(
    [
        "llama",
        "llama-embed",
        "eagle3",
        "deci",
        "deepseek",
        "arctic",
        "baichuan",
        "bailingmoe",
        "chameleon",
        "internlm2",
        "xverse",
        "olmo",
        "minicpm",
        "granite",
        "granitemoe",
        "granitehybrid",
        "granite_swa",
        "llada",
        "nanbeige",
        "arcee",
        "smollm3",
        "mistral3",
        "muse-glimmer",
        "nemotron_h",
        "nemotron_h_moe",
    ]
)
TILED = frozenset({"qwen35", "qwen35moe", "qwen4exp"})
PIXTRAL, GEMMA3 = "clip pixtral", "clip gemma3"  # architecture and type of projectors with conventions of their own
PLUS_ONE = TILED | frozenset(
    ["gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", "minimax-m3", "step35", "qwen3next"]
)
NEGATED = TILED | frozenset(
    [
        "mamba",
        "mamba2",
        "jamba",
        "falcon-h1",
        "granitehybrid",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "qwen3next",
        "kimi-linear",
        "kimi-k3",
        "glm5-next",
    ]
)


class Model(NamedTuple):
    """One block of the model, as the metadata of a GGUF file describe it."""

    metadata: GgufMetadata
    block: int

    @property
    def heads(self) -> int | None:
        """The number of query heads of the block."""
        return self.metadata.heads(self.block) or self.metadata.get_int("clip.vision.attention.head_count")

    @property
    def kv_heads(self) -> int | None:
        """The number of key heads of the block."""
        return self.metadata.kv_heads(self.block) or self.heads

    def number(self, key: str) -> int:
        """Return a number of the file's metadata, 0 if it has none."""
        return self.metadata.get_model_int(key, self.block) or 0


class Ordered(NamedTuple):
    """An order of rows or columns that the converter applies to some tensors of some architectures."""

    architectures: frozenset[str]
    tensors: str  # pattern of a tensor's last word
    order: Callable[[Model, int], Order | None]  # takes the number of rows or columns; None: metadata do not fit
    text: str  # the order in words
    otherwise: str  # the usual order in words
    is_usual: bool = False  # files of other architectures may have it by mistake
    columns: bool = False  # the order of columns, not of rows

    def find(self, model: Model, shape: tuple[int, ...]) -> Order | None:
        """Return the order of a stored weight's rows, columns, or elements; None if the metadata do not fit them."""
        along_columns = self.columns or len(shape) == 1
        order = self.order(model, as_matrix(shape)[1 if along_columns else 0])
        return order and order._replace(columns=self.columns)


class Changed(NamedTuple):
    """A change of numbers, from the original to what is stored."""

    architectures: frozenset[str]
    tensors: str  # pattern of a tensor's last word
    change: Callable[[JsonFields], Change | None]  # takes the original's configuration
    is_usual: bool = False  # files of other architectures may have it by mistake


Row = TypeVar("Row", Ordered, Changed)


def _pair_queries(model: Model, rows: int) -> Order | None:
    return _pair_rows(rows, model.heads)


def _pair_keys(model: Model, rows: int) -> Order | None:
    return _pair_rows(rows, model.kv_heads)


def _pair_rows(rows: int, heads: int | None) -> Order | None:
    return grid(2, rows // heads // 2) if heads and not rows % (2 * heads) else None


def _pair_fused(model: Model, rows: int) -> Order | None:
    """Return the order of q, k and v in one tensor, where the rows of q and k are in pairs."""
    heads, kv_heads = model.metadata.heads(model.block) or 0, model.metadata.kv_heads(model.block) or 0
    head = rows // (heads + 2 * kv_heads) if heads else 0
    if not head or head % 2 or rows != head * (heads + 2 * kv_heads):
        return None
    return join_orders(repeat_order(grid(2, head // 2), heads + kv_heads), head * kv_heads)


def _value_heads(model: Model) -> tuple[int, int, int] | None:
    """Return the numbers of key heads and of value heads for each, and the rows of a value head."""
    keys, values = model.number("ssm.group_count"), model.number("ssm.time_step_rank")
    if not keys or not values or values % keys or model.number("ssm.inner_size") % values:
        return None
    return keys, values // keys, model.number("ssm.inner_size") // values


def _tile_values(model: Model, rows: int) -> Order | None:
    heads = _value_heads(model)
    return grid(*heads) if heads and rows == heads[0] * heads[1] * heads[2] else None


def _tile_below_keys(model: Model, rows: int) -> Order | None:
    """Return the order of queries, keys and values in one tensor, where the values are tiled."""
    size = model.number("ssm.inner_size")
    values = _tile_values(model, size) if size < rows else None
    return values and join_orders(rows - size, values)


def _tile_heads(model: Model, rows: int) -> Order | None:
    heads = _value_heads(model)
    return grid(heads[0], heads[1]) if heads and rows == heads[0] * heads[1] else None


def _gather_heads(model: Model, rows: int) -> Order | None:
    """Return the order of q, k and v of each head, stored as all q, all k and all v."""
    heads = model.metadata.heads(model.block)
    return grid(heads, 3, rows // heads // 3) if heads and not rows % (3 * heads) else None


def _gather_groups(model: Model, rows: int) -> Order | None:
    """Return the order of the queries, the key and the value of each key head, stored as all q, all k and all v."""
    heads, groups = model.metadata.heads(model.block) or 0, model.metadata.kv_heads(model.block) or 0
    each = heads // groups + 2 if groups and not heads % groups else 0
    if not each or rows % (groups * each):
        return None
    stored = [*(group * each + n for group in range(groups) for n in range(each - 2))]
    stored += [group * each + each - 2 + projection for projection in (0, 1) for group in range(groups)]
    return Order(tuple(stored), rows // (groups * each)).inverse


def _gather_key_heads(model: Model, rows: int) -> Order | None:
    """Return the order of q, k, v and z of each key head, stored as all q, all k, all v and all z."""
    heads, key, values = model.number("ssm.group_count"), model.number("ssm.state_size"), model.number("ssm.inner_size")
    if not heads or not key or values % heads or rows != 2 * (heads * key + values):
        return None
    parts = key, key, values // heads, values // heads  # rows of a head
    unit = gcd(*parts)
    starts = [sum(parts[:n]) // unit for n in range(4)]
    stored = [
        head * sum(parts) // unit + starts[n] + row
        for n in range(4)
        for head in range(heads)
        for row in range(parts[n] // unit)
    ]
    return Order(tuple(stored), unit).inverse


class Split(NamedTuple):
    """A weight of the original whose rows are in several tensors of the file, in another order."""

    pieces: tuple[str, ...]  # last words of the tensors
    # From the number of rows: the order of the pieces' rows, one by one; None if the metadata do not fit.
    order: Callable[[Model, int], Order | None]


SPLIT: Mapping[str, Mapping[str, Split]] = {
    "qwen3next": {"in_proj_qkvz": Split(("attn_qkv", "attn_gate"), _gather_key_heads)},
    "internlm2": {"wqkv": Split(("attn_q", "attn_k", "attn_v"), _gather_groups)},
}

HALVES, PAIRS = "rows of heads in halves", "rows of heads in pairs"
GROUPED, TILES = "value heads grouped by key head", "value heads tiled"
ORDERS = (
    Ordered(PAIRED | {PIXTRAL}, "attn_q", _pair_queries, PAIRS, HALVES, is_usual=True),
    Ordered(PAIRED | {PIXTRAL}, "attn_k", _pair_keys, PAIRS, HALVES, is_usual=True),
    Ordered(PAIRED, "attn_qkv", _pair_fused, PAIRS, HALVES),
    Ordered(TILED, "attn_qkv|ssm_conv1d", _tile_below_keys, TILES, GROUPED),
    Ordered(TILED, "attn_gate", _tile_values, TILES, GROUPED),
    Ordered(TILED, "ssm_(alpha|beta|a|dt)", _tile_heads, TILES, GROUPED),
    Ordered(TILED, "ssm_out", _tile_values, TILES, GROUPED, columns=True),
    Ordered(frozenset({"bloom", "gptneox"}), "attn_qkv", _gather_heads, "q, then k, then v", "q, k, v of each head"),
    Ordered(frozenset({"falcon"}), "attn_qkv", _gather_groups, "q, then k, then v", "q, k, v of each key head"),
)


FALCON_H1 = frozenset({"falcon-h1"})
NUMBERS = (
    Changed(PLUS_ONE, r"(?!ssm_norm)(\w+\.)?\w*norm(_\w+)?", always(Added(1.0)), is_usual=True),
    Changed(frozenset({GEMMA3}), "soft_emb_norm", always(Added(1.0))),
    Changed(NEGATED, "ssm_a", always(NegatedExponential())),
    Changed(frozenset({"clip"}), "per_dim_(k_)?scale", always(SoftPlus())),
    Changed(frozenset({"bailingmoe3"}), "ssm_a", always(Exponential())),
    Changed(FALCON_H1, "ffn_down", multiply(("mlp_multipliers", 1))),
    Changed(FALCON_H1, "ffn_gate", multiply(("mlp_multipliers", 0))),
    Changed(FALCON_H1, "attn_k", multiply(("key_multiplier", None), ("attention_in_multiplier", None))),
    Changed(FALCON_H1, "attn_[qv]", multiply(("attention_in_multiplier", None))),
    Changed(FALCON_H1, "attn_output", multiply(("attention_out_multiplier", None))),
    Changed(FALCON_H1, "ssm_out", multiply(("ssm_out_multiplier", None))),
    Changed(FALCON_H1, "ssm_in", multiply_mamba_inputs),
    Changed(FALCON_H1, "output", multiply(("lm_head_multiplier", None))),
    Changed(FALCON_H1, "token_embd", multiply(("embedding_multiplier", None))),
)


def order_patches(shape: tuple[int, ...]) -> Order | None:
    """Return the order of the columns of a kernel [out, channels, frames, h, w] whose frames follow each other."""
    channels, frames, *size = shape[1:] if len(shape) == 5 else (0, 0)
    return grid(channels, frames, prod(size), columns=True) if channels else None


def order_pixels(stored: tuple[int, ...]) -> Order:
    """Return the order of the columns of a patch, [out, h × w × channels], that is stored [out, channels, h, w]."""
    return grid(prod(stored[2:]), stored[1], columns=True)


@cache
def find_orders(architecture: str, word: str) -> tuple[tuple[Ordered, ...], tuple[Ordered, ...]]:
    """Return the orders that a tensor has in an architecture, and those that it may have by mistake."""
    fitting = [row for row in ORDERS if re.fullmatch(row.tensors, word)]
    return _divide(fitting, architecture)


@cache
def find_changes(architecture: str, word: str) -> tuple[tuple[Changed, ...], tuple[Changed, ...]]:
    """Return the changed numbers that a tensor has in an architecture, and those that it may have by mistake."""
    fitting = [row for row in NUMBERS if re.fullmatch(row.tensors, word)]
    return _divide(fitting, architecture)


def _divide(rows: list[Row], architecture: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    matching = tuple(row for row in rows if architecture in row.architectures)
    return matching, tuple(row for row in rows if row.is_usual and row not in matching)
