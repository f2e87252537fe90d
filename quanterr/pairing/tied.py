"""Weights that are one and the same in the model (tied), and that a checkpoint may store once or several times.

Which they are is given by their names, that they are tied by the values of the original: two of its tensors are equal.

Reference: huggingface/transformers@5.23.0 _tied_weights_keys of OPT, T5, BART, BERT, RoBERTa, GPT-NeoX and others.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.pairing.names import EMBEDDINGS, HEADS, canonical
from quanterr.roles import block_of

# Paths outside of blocks: a row, or an element of a bias, for each token.
_WEIGHTS = re.compile(
    r"(.*\.)?(lm_head|output|embed_tokens|token_embd|wte|shared|word_embeddings|embeddings|embed_in|embed_out"
    r"|tok_embeddings|(lm_head|predictions)\.decoder|vocab_projector)"
)
_BIASES = re.compile(r"(.*\.)?(lm_head|predictions)(\.decoder)?")


class Twin(NamedTuple):
    """What a weight of the original is tied to."""

    there: str  # name of what stands for it in the quantized checkpoint
    copy: str | None  # name of what must then equal it in the original; None where that has no other


class Ties:
    """Which weights of two checkpoints may be tied."""

    def __init__(
        self, original: Mapping[str, Entry], quantized: Mapping[str, Entry], counterparts: Mapping[str, str]
    ) -> None:
        """``counterparts`` are names of the original and what they are called in the quantized checkpoint."""
        self._original, self._counterparts = original, counterparts
        self._here, self._there = ([name for name in codes if _group(name)] for codes in (original, quantized))

    def twin(self, name: str) -> Twin | None:
        """What may stand for a weight of the original that the quantized checkpoint does not have."""
        group, shape = _group(name), self._original[name].shape
        if not group:
            return None
        others = [other for other in self._here if other != name and _group(other) == group]
        copies = [other for other in others if self._original[other].shape == shape]
        for copy in copies:
            if copy in self._counterparts:
                return Twin(self._counterparts[copy], copy)
        there = self._embedding(self._there)
        if group != "weight" or there is None or (others and not copies):
            return None
        return Twin(there, copies[0] if copies else None)

    def original_of(self, extra: str) -> str | None:
        """The weight of the original that one of the quantized checkpoint alone may be a copy of."""
        path, _ = canonical(extra)
        has_head = any(canonical(name)[0] in HEADS for name in self._here)
        if _group(extra) != "weight" or (path in HEADS and has_head):
            return None
        return self._embedding(self._here)

    @staticmethod
    def _embedding(names: list[str]) -> str | None:
        """The embedding of tokens, if there is just one; of none with a usual name the only one with any."""
        weights = [name for name in names if _group(name) == "weight"]
        found = [name for name in weights if canonical(name)[0] in EMBEDDINGS] or weights
        return found[0] if len(found) == 1 else None


def _group(name: str) -> str | None:
    """What it may be tied to: "weight" or "bias" of a vocabulary; None for all that is not."""
    path, kind = canonical(name)
    pattern = _BIASES if kind else _WEIGHTS
    if not pattern.fullmatch(path) or block_of(name) is not None:
        return None
    return "bias" if kind else "weight"
