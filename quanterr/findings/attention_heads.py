"""Contradictions between the declared sizes of attention heads and the shapes of projections.

The projection of queries has a row for each element of each head, or two if it also computes an output gate; those of
keys and values have one. As layers of a model may differ, the declared sizes are wrong only if no layer has them.

llama.cpp refuses a model of some architectures whose rope.dimension_count is not the size of a head (ggml-org/llama.cpp
src/llama-model.cpp load_hparams, "invalid n_rot"), and rotates fewer elements in others.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quanterr.checkpoints import GgufMetadata
from quanterr.documents.base import Finding
from quanterr.findings.checks import DECLARED, QUANTIZED, check
from quanterr.findings.codes import make_finding
from quanterr.findings.configs import CONFIG, GGUF, SIZE_KEYS
from quanterr.findings.contents import Contents, Stored
from quanterr.util.strict_json import JsonFields

# The beginning of a weight's name.
BLOCK_PREFIX = r"(?:blk|(?:model\.)?(?:language_model\.)?(?:model\.)?layers)\.(\d+)\."
PROJECTION = re.compile(BLOCK_PREFIX + r"(?:self_attn\.([qkvo])_proj|attn_(q|k|v|output))\.weight")
WINDOW_KEY = "attention.key_length_swa"  # present if layers with a sliding window have heads of another size (Gemma 4)
UNEVEN_KEYS = (*SIZE_KEYS, "linear_attn_config", "block_configs", "attention.kv_lora_rank")  # heads of several sizes
CHECKED_ARCHITECTURES = frozenset({"llama", "deci", "falcon", "llama-embed"})  # llama.cpp checks their n_rot
FULLY_ROTATED = CHECKED_ARCHITECTURES | {"qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"}
REMEDY = "convert or quantize again from the original's configuration: runtimes split projections by what is declared"


class Heads(NamedTuple):
    """Declared numbers of heads and sizes of keys and values."""

    queries: int
    keys: int
    key_size: int
    value_size: int

    def fit(self, shapes: dict[str, tuple[int, ...]]) -> bool:
        """Return whether the projections q, k, v and o of a layer have these heads."""
        q, k, v, o = (shapes[name] for name in "qkvo")
        gated = 2 * self.queries * self.key_size
        return (
            q[0] in (self.queries * self.key_size, gated)
            and (k[0], v[0]) == (self.keys * self.key_size, self.keys * self.value_size)
            and o[1] == self.queries * self.value_size
        )

    def __str__(self) -> str:
        sizes = f"keys of {self.key_size} and values of {self.value_size} elements"
        return f"{self.queries} query heads and {self.keys} key heads, {sizes}"


@check("config_mismatch", needs=DECLARED, of=QUANTIZED)
def check_heads(contents: Contents) -> Iterator[Finding]:
    """Report declared sizes of heads that no layer has, and rotations of only a part of each head."""
    checkpoint = contents.checkpoint
    metadata, layers = checkpoint.gguf, _gather_projections(contents.weights)
    read = [_read_gguf(metadata, n) if metadata else _read_config(checkpoint.model_config) for n in layers]
    declared = [(heads, shapes) for heads, shapes in zip(read, layers.values(), strict=True) if heads]
    if declared and not any(heads.fit(shapes) for heads, shapes in declared):
        heads, shapes = declared[0]
        sizes = ", ".join(f"{name} {list(shapes[name])}" for name in "qkvo")
        message = f"{GGUF if metadata else CONFIG} declares {heads}, but the projections are of other sizes: {sizes}"
        yield make_finding("config_mismatch", "warning", None, message, REMEDY, key="head_dim")
    if metadata:
        yield from _check_rotation(metadata)


def _gather_projections(stored: Sequence[Stored]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the shapes of q, k, v and o of each layer that has them all as matrices."""
    shapes_by_block: dict[int, dict[str, tuple[int, ...]]] = {}
    for projection in stored:
        if (
            projection.has_shape
            and len(projection.weight.shape) == 2
            and (match := PROJECTION.fullmatch(projection.name))
        ):
            letter = match[2] or match[3][0]  # "output" becomes o
            shapes_by_block.setdefault(int(match[1]), {})[letter] = projection.weight.shape
    return {n: shapes for n, shapes in shapes_by_block.items() if len(shapes) == len("qkvo")}


def _read_config(config: JsonFields) -> Heads | None:
    """Return the heads that config.json declares; None if a number is absent: defaults depend on the model's class."""
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
    queries, kv, size = (value if type(value := config.get(key)) is int else 0 for key in keys)
    value_size = config.get("v_head_dim")
    if not queries or not kv or not size or any(config.get(key) for key in UNEVEN_KEYS):
        return None
    return Heads(queries, kv, size, value_size if isinstance(value_size, int) and value_size else size)


def _read_gguf(metadata: GgufMetadata, block: int) -> Heads | None:
    """Return the heads that the metadata declare for a block, with llama.cpp's defaults."""
    queries, keys, width = metadata.heads(block), metadata.kv_heads(block), metadata.get_model_int("embedding_length")
    if not queries or not keys or not width or any(metadata.get_model_int(key) for key in (*UNEVEN_KEYS, WINDOW_KEY)):
        return None
    sizes = (metadata.get_model_int(f"attention.{role}_length") or width // queries for role in ("key", "value"))
    return Heads(queries, keys, *sizes)


def _check_rotation(metadata: GgufMetadata) -> Iterator[Finding]:
    """Report a rope.dimension_count above the size of a head, or below it where whole heads must be rotated."""
    heads, rotated = _read_gguf(metadata, 0), metadata.get_model_int("rope.dimension_count")
    if not heads or not rotated or rotated == heads.key_size:
        return
    if rotated > heads.key_size or metadata.architecture in FULLY_ROTATED:
        does = "llama.cpp " + (
            "refuses the file" if metadata.architecture in CHECKED_ARCHITECTURES else "rotates other elements"
        )
        message = f"{GGUF} declares rope.dimension_count {rotated}, but heads have {heads.key_size} elements: {does}"
        yield make_finding("config_mismatch", "warning", None, message, REMEDY, key="rope.dimension_count")
