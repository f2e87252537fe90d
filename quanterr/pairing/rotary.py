"""The row order of q and k: RoPE rotates rows in pairs, which programs store in two ways.

    transformers             the rows of a pair are half a head apart: (0, d/2), (1, d/2 + 1), …
    Mistral's and Meta's     the rows of a pair are adjacent: attention.wq and attention.wk

Reference: huggingface/transformers@5.23.0 models/llama/convert_llama_weights_to_hf.py permute;
mistral/convert_mistral_weights_to_hf.py.
"""

import re
from collections.abc import Iterable

from msgspec.structs import replace

from quanterr.errors import FormatMismatch
from quanterr.pairing.model import Pair
from quanterr.pairing.names import CONVENTIONS
from quanterr.pairing.views import unpair_rows
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

_PAIRED = re.compile("|".join(row.row_pairs for row in CONVENTIONS if row.row_pairs))
_QUERY = ("num_attention_heads", "n_heads")
_HEADS = {"q": _QUERY, "k": ("num_key_value_heads", "n_kv_heads", *_QUERY)}


def has_row_pairs(name: str) -> bool:
    """Return whether the name says that the rows of a pair are adjacent."""
    return _PAIRED.fullmatch(name) is not None


def unify_row_order(pair: Pair, configs: Iterable[JsonFields]) -> Pair:
    """Return the pair with the rows of each head in halves on both sides; ``configs`` are both checkpoints' configs.

    Raises:
        FormatMismatch: the orders differ, and no config gives a fitting number of heads.
    """
    names = pair.original.codes.name, pair.quantized.codes.name
    if names[0] == names[1]:
        return pair
    paired = [_PAIRED.fullmatch(name) for name in names]
    word = next((found[1] for found in paired if found), None)
    if word is None or all(paired):
        return pair
    stored, heads = pair.original if paired[0] else pair.quantized, _find_head_count(word, configs)
    both = f"{display(names[0])} and {display(names[1])} have the rows of each head in another order"
    if not heads:
        raise FormatMismatch(f"{both}, and neither config.json nor params.json gives the number of heads")
    if stored.shape[0] % (2 * heads):
        raise FormatMismatch(f"{both}, and {heads} heads of pairs do not fit its {stored.shape[0]} rows")
    halves = unpair_rows(stored, heads)
    halves = replace(halves, evidence=(*halves.evidence, f"rows of {heads} heads reordered from pairs to halves"))
    if paired[0]:
        return replace(pair, original=halves)
    # A file with Mistral's names may still have the order of transformers.
    as_stored = replace(stored, evidence=("rows of heads as they are stored", *stored.evidence))
    return replace(pair, quantized=halves.with_alternatives((*halves.alternatives, as_stored)))


def _find_head_count(word: str, configs: Iterable[JsonFields]) -> int | None:
    for config in configs:
        text = config.get("text_config")
        for place in (config, text if isinstance(text, dict) else {}):
            for key in _HEADS[word]:
                value = place.get(key)
                if type(value) is int and value > 0:
                    return value
    return None
