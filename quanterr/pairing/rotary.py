"""The order of q's and k's rows: RoPE turns them by pairs, which programs store in two ways.

    transformers             a pair's rows are half a head apart: (0, d/2), (1, d/2 + 1), …
    Mistral's and Meta's     next to each other: attention.wq and attention.wk

Reference: huggingface/transformers@5.23.0 models/llama/convert_llama_weights_to_hf.py permute;
mistral/convert_mistral_weights_to_hf.py.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from quanterr.errors import FormatMismatch
from quanterr.pairing.names import CONVENTIONS
from quanterr.pairing.plan import Pair
from quanterr.pairing.views import unpaired
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

_PAIRED = re.compile("|".join(row.row_pairs for row in CONVENTIONS if row.row_pairs))
_QUERY = ("num_attention_heads", "n_heads")
_HEADS = {"q": _QUERY, "k": ("num_key_value_heads", "n_kv_heads", *_QUERY)}


def in_pairs(name: str) -> bool:
    """Whether a weight of that name has the rows of a pair next to each other."""
    return _PAIRED.fullmatch(name) is not None


def in_one_order(pair: Pair, configs: Iterable[JsonFields]) -> Pair:
    """The pair with rows of heads in halves on both sides; ``configs`` are the files beside both checkpoints.

    Raises:
        FormatMismatch: the order differs, and nothing gives the number of heads.
    """
    names = pair.original.codes.name, pair.quantized.codes.name
    paired = [_PAIRED.fullmatch(name) for name in names]
    word = next((found[1] for found in paired if found), None)
    if word is None or all(paired):
        return pair
    stored, heads = pair.original if paired[0] else pair.quantized, _number_of_heads(word, configs)
    both = f"{display(names[0])} and {display(names[1])} have the rows of each head in another order"
    if not heads:
        raise FormatMismatch(f"{both}, and neither config.json nor params.json gives the number of heads")
    if stored.shape[0] % (2 * heads):
        raise FormatMismatch(f"{both}, and {heads} heads of pairs do not fit its {stored.shape[0]} rows")
    halves = unpaired(stored, heads)
    halves = replace(halves, evidence=(*halves.evidence, f"rows of {heads} heads reordered from pairs to halves"))
    if paired[0]:
        return replace(pair, original=halves)
    # a file whose names alone are Mistral's
    as_stored = replace(stored, evidence=("rows of heads as they are stored", *stored.evidence))
    return replace(pair, quantized=halves.with_alternatives((*halves.alternatives, as_stored)))


def _number_of_heads(word: str, configs: Iterable[JsonFields]) -> int | None:
    for config in configs:
        text = config.get("text_config")
        for place in (config, text if isinstance(text, dict) else {}):
            for key in _HEADS[word]:
                value = place.get(key)
                if type(value) is int and value > 0:
                    return value
    return None
