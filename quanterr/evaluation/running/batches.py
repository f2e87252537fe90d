"""Micro-batches, which are the chunks that go through a unit together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from quanterr.evaluation.denoisers.calls import Call, Calls
from quanterr.evaluation.texts.tokens import Chunks, spans_of


class WithMedia(NamedTuple):
    """A conversation with images or sounds: its token ids (1, tokens), and what the processor made of these."""

    ids: Tensor
    media: Mapping[str, object]


class Batch(NamedTuple):
    """One micro-batch: its index, and its chunks (n, context) as the model gets them and as they are in the text.

    One recorded call is a micro-batch of its own.
    """

    number: int
    given: Any
    raw: Any
    tokens: int
    first: int  # number of its first chunk
    in_text: int  # number of its first chunk within its own text
    scored: Tensor | None = None  # (n, context) bool, for conversations only


def batches_of(texts: Sequence[Chunks] | Calls, size: int) -> list[Batch]:
    """Return micro-batches of ``size`` chunks; conversations, which differ in length, are one micro-batch each."""
    if isinstance(texts, Calls):
        return batches_of_calls(texts.calls)
    batches: list[Batch] = []
    for chunks, span in zip(texts, spans_of(texts), strict=True):
        step = 1 if chunks.lengths else size
        for n in range(0, len(chunks.raw), step):
            width = chunks.lengths[n] if chunks.lengths else chunks.raw.shape[1]
            given, raw = (each[n : n + step, :width] for each in (chunks.given, chunks.raw))
            scored = None if chunks.scored is None else chunks.scored[n : n + step, :width]
            media = chunks.media[n] if chunks.media else {}
            batches.append(
                Batch(len(batches), WithMedia(given, media) if media else given, raw, raw.numel(), span[n], n, scored)
            )
    return batches


def batches_of_calls(calls: Sequence[Call]) -> list[Batch]:
    """Return recorded calls, each a micro-batch of its own."""
    return [Batch(n, call, call, _count_tokens(call), n, n) for n, call in enumerate(calls)]


def _count_tokens(call: Call) -> int:
    """Return the approximate number of vectors of a call that pass through the model's weights."""
    tensors = [value for value in call.arguments.values() if isinstance(value, Tensor) and value.dim()]
    return max((value.numel() // max(value.shape[-1], 1) for value in tensors), default=1)
