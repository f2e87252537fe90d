"""The role of a weight in its model, inferred from its name, by which reports group layers and users select them.

It is that of the first row of :data:`ROLES` that matches a component, which is a part of the name between dots.
"""

import re
import sys
from functools import lru_cache
from typing import NamedTuple

# Role, and the pattern that a whole component of the name must match.
ROLES: tuple[tuple[str, str], ...] = (
    ("vae", r"vae|first_stage_model"),
    ("text_encoder", r"text_encoders?(_\d)?|cond_stage_model|conditioner|t5xxl|clip_[lg]"),
    ("experts", r"experts?|.*_experts?|block_sparse_moe|ffn_\w+_(exps|shexp)"),
    # Diffusion models: modulation of each block by time and pooled text; then the embedders of both.
    ("modulation", r".*modulation|((img|txt|x|context)_)?mod|adaln_.*|scale_shift_table|time_projection"),
    (
        "conditioning",
        r"[ty]_embedder|(time|vector|guidance)_in|time_embed(ding)?|time_text_embed|label_emb|emb_layers|"
        r"(timestep|guidance|text)_embedder|text_embedding|caption_projection",
    ),
    ("norm", r".*norm\d?(_[a-z]+)?|.*layernorm.*|ln_?(\d|f|pre|post|attn|mlp)?|rms.*|norm_.*"),
    (
        "mlp",
        r".*mlp.*|ffn?(_(gate|up|down))?|feed_?forward|(gate|up|down)_proj|gate_up_proj|fc\d|w[123]|intermediate|dense\w*dense",
    ),
    (
        "attention",
        r".*attn\d?.*|.*attention|[qkv]_proj|o_proj|qkv|to_[qkv]|to_out|qkv_proj|wqkv|selfattention|encdecattention",
    ),
    ("single_block", r"(?!)"),  # attention and MLP in one weight, which role_of recognizes
    ("convolution", r"conv(_in|_out|_shortcut|\d)?|(in|out)_layers|skip_connection|resnets|(down|up)samplers?"),
    ("head", r"lm_head|head|output|classifier|score|final_layer|proj_out"),
    ("embedding", r".*embe?d.*|wte|wpe|shared|.*embedder|patch_in|img_in|txt_in"),
)
OTHER = "other"

# Words that --layers-to-compare accepts besides the roles.
ALIASES = {
    "attn": "attention",
    "embed": "embedding",
    "expert": "experts",
    "norms": "norm",
    "te": "text_encoder",
    "text_encoders": "text_encoder",
}

MAX_DIGITS = 9  # maximum number of digits of a block number

_COMPILED = tuple((role, re.compile(pattern, re.IGNORECASE)) for role, pattern in ROLES)
_SINGLE = re.compile(r"(^|\.)single_blocks\.\d+\.linear[12]\.")
_ADAPTIVE = re.compile(r"\.norm\w*\.linear\.(weight|bias)$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a numeric component
_INDEXED = re.compile(r"(?:^|\.)([^.]+)\.(\d+)(?:\.|$)")


@lru_cache(maxsize=1 << 10)
def _roles_of_component(component: str) -> frozenset[str]:
    return frozenset(role for role, pattern in _COMPILED if pattern.fullmatch(component))


def role_of(name: str) -> str:
    """Return the role of a weight: one of :data:`ROLES`, or ``other``."""
    return _find_role(unify_numbers(name))


def is_routed_expert(name: str) -> bool:
    """Return whether a weight belongs to a routed expert; shared experts always run."""
    return role_of(name) == "experts" and "shared" not in name and "shexp" not in name


@lru_cache(maxsize=1 << 12)  # all blocks have the same names
def _find_role(name: str) -> str:
    words = (part for part in name.split(".") if not part.isdecimal())
    roles = frozenset[str]().union(*map(_roles_of_component, words))
    role = next((role for role, _ in ROLES if role in roles), OTHER)
    if role == OTHER and _SINGLE.search(name):
        return "single_block"
    if role == "norm" and _ADAPTIVE.search(name):  # diffusers' name for the linear layer of an adaptive norm
        return "modulation"
    # A block's output layer (BERT's output.dense, Flux's proj_out) is the second half of its MLP.
    return "mlp" if role == "head" and block_of(name) else role


@lru_cache(maxsize=1 << 10)  # several steps call it for the same weight
def unify_numbers(name: str) -> str:
    """Return a name with 0 for each numeric component, so that it is the same in all blocks and experts."""
    return _NUMBER.sub("0", name)


def without_numbers(name: str) -> str:
    """Return a name without its numeric components, so that it is the same in all blocks and experts."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def block_of(name: str) -> str | None:
    """Return the block of a weight, such as ``layers.12`` or ``double_blocks.3``; None outside all blocks."""
    match = _INDEXED.search(name)
    return sys.intern(f"{match[1]}.{match[2]}") if match else None  # one string for all weights of a block


class Position(NamedTuple):
    """The position of a weight in its model: stack ``model.layers``, block 12, module ``self_attn.q_proj``."""

    stack: str
    block: int
    module: str


@lru_cache(maxsize=1 << 16)  # several parts of a page call it
def place_of(name: str) -> Position | None:
    """Return the stack, block number and module of a weight; None outside all blocks.

    Numbers within the module, as in ``experts.17.up_proj``, become ``*``.
    """
    match = _INDEXED.search(name)
    if match is None or len(match[2]) > MAX_DIGITS:
        return None
    return Position(name[: match.end(1)], int(match[2]), _name_module(name[match.end(2) + 1 :]))


@lru_cache(maxsize=1 << 12)  # cached, as every block has the same modules
def _name_module(rest: str) -> str:
    """Return the name of a module from the rest of a weight's name after its block."""
    *around, last = (rest.removesuffix(".weight") or "weight").split(".")
    return ".".join(["*" if part.isdigit() else part for part in around] + [last])
