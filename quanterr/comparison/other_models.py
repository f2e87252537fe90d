"""Decides whether two checkpoints without common tensor names are different models, or differ only in names."""

import re

from quanterr.checkpoints import Checkpoint
from quanterr.pairing.converters.denoisers import name_family
from quanterr.util.text import count, display, itemize

LANGUAGE_MODEL = re.compile(r"(^|\.)(layers|h|blk)\.\d+\.(self_attn|attn|attention|attn_q|mlp|ffn_up)\.")
MIN_VECTORS = 4  # norms and biases that are compared by length: if there are fewer, lengths may differ by chance
BLOCK = re.compile(r"^(.*?\.)(\d+)\.")


def describe_other_model(original: Checkpoint, quantized: Checkpoint) -> str | None:
    """Describe how two models differ; return None if they may be the same model with other tensor names."""
    sides = original, quantized
    for known in ([_find_kind(side) for side in sides], [_read_model_type(side) for side in sides]):
        if known[0] and known[1] and known[0] != known[1]:
            first, second = (_read_model_type(side) or str(name) for side, name in zip(sides, known, strict=True))
            return f"different models: {display(first)} and {display(second)}"
    widths = [{entry.n for entry in side.entries.values() if len(entry.shape) == 1} for side in sides]
    if all(map(_has_vectors, sides)) and widths[0].isdisjoint(widths[1]):
        lengths = [itemize([str(length) for length in sorted(side)], 3) for side in widths]
        blocks = [count(_count_blocks(side), "block") for side in sides]
        return (
            f"different models: norms and biases of the original have {lengths[0]} elements, in {blocks[0]}; those of "
            f"the quantized checkpoint {lengths[1]}, in {blocks[1]}"
        )
    return None


def _find_kind(checkpoint: Checkpoint) -> str | None:
    """Return the kind of model that the names of its tensors show; None if it is unknown."""
    family = name_family(checkpoint.entries)
    return family or ("a language model like llama" if any(map(LANGUAGE_MODEL.search, checkpoint.entries)) else None)


def _read_model_type(checkpoint: Checkpoint) -> str | None:
    """Return the model_type of config.json; None if there is none."""
    declared = checkpoint.config.get("config.json", {}).get("model_type")
    return declared if isinstance(declared, str) and declared else None


def _has_vectors(checkpoint: Checkpoint) -> bool:
    return sum(len(entry.shape) == 1 for entry in checkpoint.entries.values()) >= MIN_VECTORS


def _count_blocks(checkpoint: Checkpoint) -> int:
    """Return the number of blocks: how many different numbers follow the prefix that has the largest number of them."""
    numbers: dict[str, set[str]] = {}
    for name in checkpoint.entries:
        if match := BLOCK.match(name):
            numbers.setdefault(match[1], set()).add(match[2])
    return max(map(len, numbers.values()), default=0)
