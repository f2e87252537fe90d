"""The sizes of attention heads that a checkpoint declares, held against its projections.

A projection of queries has a row for each element of each head, or two where an output gate shares it; so have keys and
values. A model may have layers of several kinds, so that a finding needs that no layer fits.

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
from quanterr.findings.configs import CONFIG, EXPLAINING, GGUF
from quanterr.findings.contents import Contents, Stored
from quanterr.util.strict_json import JsonFields

OF_BLOCK = r"(?:blk|(?:model\.)?(?:language_model\.)?(?:model\.)?layers)\.(\d+)\."  # the beginning of a weight's name
PROJECTION = re.compile(OF_BLOCK + r"(?:self_attn\.([qkvo])_proj|attn_(q|k|v|output))\.weight")
OF_WINDOWS = "attention.key_length_swa"  # heads of layers with a sliding window are of another size (Gemma 4)
OTHERWISE = (*EXPLAINING, "linear_attn_config", "block_configs", "attention.kv_lora_rank")  # heads of several sizes
REFUSING = frozenset({"llama", "deci", "falcon", "llama-embed"})  # architectures whose n_rot llama.cpp checks
WHOLE = REFUSING | {"qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"}  # whole heads are rotated
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
    """Report declared heads that no layer has, and rotations of a part of a head."""
    checkpoint = contents.checkpoint
    metadata, layers = checkpoint.gguf, _gather_projections(contents.stored)
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
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for one in stored:
        if one.has_shape and len(one.weight.shape) == 2 and (match := PROJECTION.fullmatch(one.name)):
            kind = match[2] or match[3][0]  # output: o
            found.setdefault(int(match[1]), {})[kind] = one.weight.shape
    return {n: shapes for n, shapes in found.items() if len(shapes) == len("qkvo")}


def _read_config(config: JsonFields) -> Heads | None:
    """Return what config.json declares; None unless it declares all, as what it omits depends on the model's class."""
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
    queries, kv, size = (value if type(value := config.get(key)) is int else 0 for key in keys)
    value_size = config.get("v_head_dim")
    if not queries or not kv or not size or any(config.get(key) for key in OTHERWISE):
        return None
    return Heads(queries, kv, size, value_size if isinstance(value_size, int) and value_size else size)


def _read_gguf(metadata: GgufMetadata, block: int) -> Heads | None:
    """Return what the metadata declare for a block, with llama.cpp's defaults."""
    queries, keys, width = metadata.heads(block), metadata.kv_heads(block), metadata.get_model_int("embedding_length")
    if not queries or not keys or not width or any(metadata.get_model_int(key) for key in (*OTHERWISE, OF_WINDOWS)):
        return None
    sizes = (metadata.get_model_int(f"attention.{kind}_length") or width // queries for kind in ("key", "value"))
    return Heads(queries, keys, *sizes)


def _check_rotation(metadata: GgufMetadata) -> Iterator[Finding]:
    """Report a rope.dimension_count that is not the size of a head, where it should be, or larger."""
    heads, rotated = _read_gguf(metadata, 0), metadata.get_model_int("rope.dimension_count")
    if not heads or not rotated or rotated == heads.key_size:
        return
    if rotated > heads.key_size or metadata.architecture in WHOLE:
        does = "llama.cpp " + ("refuses the file" if metadata.architecture in REFUSING else "rotates other elements")
        message = f"{GGUF} declares rope.dimension_count {rotated}, but heads have {heads.key_size} elements: {does}"
        yield make_finding("config_mismatch", "warning", None, message, REMEDY, key="rope.dimension_count")
