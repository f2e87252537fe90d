"""Tied weights: one parameter of the model that a checkpoint may store once or several times.

Names suggest candidates. Whether these are tied is decided by the original's values: its two tensors are equal.

If config.json ties the output layer to the embedding, loaders drop a stored output layer and use the embedding.

Reference: huggingface/transformers@5.23.0 _tied_weights_keys of OPT, T5, BART, BERT, RoBERTa, GPT-NeoX and others, and
modeling_utils.py tie_weights; ml-explore/mlx-lm@003da2e9 mlx_lm/models/llama.py sanitize, which removes it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.pairing.names import EMBEDDINGS, HEADS, canonicalize
from quanterr.selection.roles import block_of
from quanterr.util.strict_json import JsonFields, as_object

# Paths, outside blocks, of weights with one row for each token, and of biases with one element for each.
_TIED_WEIGHTS = re.compile(
    r"(.*\.)?(lm_head|output|embed_tokens|token_embd|wte|shared|word_embeddings|embeddings|embed_in|embed_out"
    r"|tok_embeddings|(lm_head|predictions)\.decoder|vocab_projector)"
)
_TIED_BIASES = re.compile(r"(.*\.)?(lm_head|predictions)(\.decoder)?")


TIED = "tie_word_embeddings"
DROPPED = f"config.json declares {TIED}: loaders use the embedding instead"  # the reason given for a consumed leftover


class TiedHead(NamedTuple):
    """The output layer that a checkpoint stores although its config.json ties it to the embedding."""

    head: str
    embedding: str


class Twin(NamedTuple):
    """The weights that a weight of the original may be tied to."""

    there: str  # name of its substitute in the quantized checkpoint
    copy: str | None  # name of the original's weight that must then be equal; None if the original stores no other


class Ties:
    """The weights of two checkpoints that may be tied."""

    def __init__(
        self, original: Mapping[str, Entry], quantized: Mapping[str, Entry], counterparts: Mapping[str, str]
    ) -> None:
        """Find the candidates; ``counterparts`` maps names of the original to names of the quantized checkpoint."""
        self._original, self._counterparts = original, counterparts
        self._here, self._there = ([name for name in codes if _classify(name)] for codes in (original, quantized))

    def find_twin(self, name: str) -> Twin | None:
        """Return the possible substitute for a weight of the original that the quantized checkpoint lacks."""
        group, shape = _classify(name), self._original[name].shape
        if not group:
            return None
        others = [other for other in self._here if other != name and _classify(other) == group]
        copies = [other for other in others if self._original[other].shape == shape]
        for copy in copies:
            if copy in self._counterparts:
                return Twin(self._counterparts[copy], copy)
        there = self._find_embedding(self._there)
        if group != "weight" or there is None or (others and not copies):
            return None
        return Twin(there, copies[0] if copies else None)

    def find_original(self, extra: str) -> str | None:
        """Return the original's weight that ``extra``, stored only in the quantized checkpoint, may be a copy of."""
        path, _ = canonicalize(extra)
        has_head = any(canonicalize(name)[0] in HEADS for name in self._here)
        if _classify(extra) != "weight" or (path in HEADS and has_head):
            return None
        return self._find_embedding(self._here)

    @staticmethod
    def _find_embedding(names: list[str]) -> str | None:
        """Return the token embedding if it is unique: the one with a usual name, else the only embedding."""
        weights = [name for name in names if _classify(name) == "weight"]
        embeddings = [name for name in weights if canonicalize(name)[0] in EMBEDDINGS] or weights
        return embeddings[0] if len(embeddings) == 1 else None


def find_tied_head(main: JsonFields, names: Iterable[str]) -> TiedHead | None:
    """Return the stored output layer that loaders ignore because of ``main``, the config.json; None if there is none.

    ``names`` are the weights of the checkpoint.
    """
    declared = main.get(TIED, as_object(main.get("text_config")).get(TIED))
    if declared is not True:
        return None
    weights = [name for name in names if _classify(name) == "weight"]
    heads, embeddings = (
        [name for name in weights if canonicalize(name)[0] in known] for known in ({"lm_head"}, EMBEDDINGS)
    )
    return TiedHead(heads[0], embeddings[0]) if len(heads) == len(embeddings) == 1 else None


def _classify(name: str) -> str | None:
    """Return ``weight`` or ``bias`` for a tensor of the vocabulary, which may be tied; None for all others."""
    if block_of(name) is not None:
        return None
    path, ending = canonicalize(name)
    pattern = _TIED_BIASES if ending else _TIED_WEIGHTS
    if not pattern.fullmatch(path):
        return None
    return "bias" if ending else "weight"
