"""The order of the rows of q and k: RoPE rotates pairs of rows, and programs store these pairs in two ways.

    transformers             the rows of a pair are half a head apart: (0, d/2), (1, d/2 + 1), …
    Mistral's and Meta's     the rows of a pair are adjacent: attention.wq and attention.wk

Reference: huggingface/transformers@5.23.0 models/llama/convert_llama_weights_to_hf.py permute;
mistral/convert_mistral_weights_to_hf.py.
"""

import re
from collections.abc import Iterable

from msgspec.structs import replace

from quanterr.errors import FormatMismatch
from quanterr.pairing.converters.orders import grid
from quanterr.pairing.model import Pair
from quanterr.pairing.names import CONVENTIONS
from quanterr.pairing.views import reorder
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

_PAIRED = re.compile("|".join(row.row_pairs for row in CONVENTIONS if row.row_pairs))
_QUERY = ("num_attention_heads", "n_heads")
_HEADS = {"q": _QUERY, "k": ("num_key_value_heads", "n_kv_heads", *_QUERY)}


def unify_row_order(pair: Pair, configs: Iterable[JsonFields]) -> Pair:
    """Return the pair with RoPE pairs d/2 rows apart on both sides; ``configs`` are both checkpoints' configurations.

    Raises:
        FormatMismatch: the orders differ, and no config gives a fitting number of heads.
    """
    names = pair.original.codes.name, pair.quantized.codes.name
    if names[0] == names[1]:
        return pair
    paired = [_PAIRED.fullmatch(name) for name in names]
    word = next((match[1] for match in paired if match), None)
    if word is None or all(paired):
        return pair
    return unify_side(pair, 0 if paired[0] else 1, configs)


def unify_side(pair: Pair, side: int, configs: Iterable[JsonFields]) -> Pair:
    """Return the pair with RoPE pairs d/2 rows apart on a side (0 or 1), if its name implies adjacent ones.

    Raises:
        FormatMismatch: no config gives a fitting number of heads.
    """
    stored = (pair.original, pair.quantized)[side]
    paired = _PAIRED.fullmatch(stored.codes.name)
    if paired is None:
        return pair
    heads = _find_head_count(paired[1], configs)
    names = pair.original.codes.name, pair.quantized.codes.name
    both = f"{display(names[0])} and {display(names[1])} order the rows of each head differently"
    if not heads:
        raise FormatMismatch(f"{both}, and neither config.json nor params.json gives the number of heads")
    if stored.shape[0] % (2 * heads):
        raise FormatMismatch(f"{both}, and {stored.shape[0]} rows do not divide into pairs of rows for {heads} heads")
    halves = reorder(stored, grid(2, stored.shape[0] // heads // 2))
    evidence = f"rows of {heads} heads in pairs, as its name implies"
    halves = replace(halves, evidence=(evidence, *halves.evidence), prescribed=True)
    if side == 0:
        return replace(pair, original=halves)
    as_stored = replace(stored, evidence=("rows of heads in halves", *stored.evidence))
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
