"""The head of a model and the model's own code after it, which compute the logits of some positions at a time.

All logits of a long context would take far more memory than the model: with 32,768 tokens and a vocabulary of 128,000,
the second half alone takes 8 GiB for each side.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quanterr.evaluation.models.units import Unit

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

MAX_LOGITS = 1 << 27  # a micro-batch with more logits is cut into pieces
PIECE_LOGITS = 1 << 25  # number of logits in a piece


class _Body:
    """What a model's body returns: hidden states, and None for any other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int | slice) -> object:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class Tail:
    """A model whose body returns given hidden states, from which its loaded head and later code compute logits."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Replace the body of a model that no longer needs it."""
        self._model, self._device = model, device
        self._hidden: Tensor | None = None
        base = getattr(model, "base_model", None)
        for body in (base, getattr(base, "decoder", None)):  # a model may call either before its head
            if isinstance(body, nn.Module) and body is not model:
                body.forward = self._return_hidden

    def _return_hidden(self, *_: object, **__: object) -> _Body:
        assert self._hidden is not None  # noqa: S101 - set by the only caller
        return _Body(self._hidden)

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, inputs: Mapping[str, object]) -> "ModelOutput":
        """Return the model's result for these inputs if its body returns these hidden states."""
        self._hidden = hidden.to(self._device)
        on_device = {
            key: value.to(self._device) if isinstance(value, Tensor) else value for key, value in inputs.items()
        }
        return self._model(**on_device)


def spans_of(chunks: int, positions: int, vocabulary: int) -> list[tuple[int, int]]:
    """Return the first and last positions of pieces, counted from the end; one span if they are computed at once."""
    if chunks * positions * vocabulary <= MAX_LOGITS:
        return [(-positions, 0)]
    step = max(PIECE_LOGITS // (chunks * vocabulary), 1)
    return [(first, min(first + step, 0)) for first in range(-positions, 0, step)]


def head_of(model: nn.Module, units: Mapping[str, Unit]) -> Unit | None:
    """Return the unit of a model's head; None if there is no head, or if it is not a unit."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((unit for unit in units.values() if unit.module is head), None)
