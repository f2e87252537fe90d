"""Attention over long contexts, for some queries at a time, with masks that all sides and micro-batches share.

torch's attention takes little memory without a mask. With a mask, such as that of a sliding window, torch converts the
mask to floats on CPUs; models that compute attention in their own code, such as gpt-oss, keep all scores.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

MAX_ELEMENTS = 1 << 25  # maximum size of a mask, or of scores, that are computed at once
MIN_SHARED_ELEMENTS = 1 << 22  # smaller masks are not shared


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **more: Any) -> Any:
    """Return ``F.scaled_dot_product_attention``, for some queries at a time if there is a large mask."""
    queries, keys = query.shape[-2], key.shape[-2]
    if attn_mask is None or queries * keys <= MAX_ELEMENTS:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **more)
    outputs = [
        F.scaled_dot_product_attention(
            query[..., span, :], key, value, _take_rows(attn_mask, span, queries), *args, **more
        )
        for span in _list_spans(queries, MAX_ELEMENTS // keys)
    ]
    return torch.cat(outputs, -2)


@contextmanager
def attention_in_pieces() -> Iterator[None]:
    """Within the context, models of transformers compute their own attention in pieces, and share equal masks."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
        from transformers.modeling_utils import AttentionInterface
    except ImportError:  # code that needs transformers raises an error
        yield
        return
    look_up = AttentionInterface.get_interface

    def get_interface(self: object, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention: Callable[..., Any] = look_up(self, name, default)
        return _compute_in_pieces(attention) if attention is default else attention

    known: list[weakref.ref[Tensor]] = []
    AttentionInterface.get_interface = get_interface
    for name in ("sdpa", "eager"):
        MASKS[name] = _share_masks(MASKS[name], known)
    try:
        yield
    finally:
        AttentionInterface.get_interface = look_up
        for name in ("sdpa", "eager"):
            del MASKS[name]


def _compute_in_pieces(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's attention that is computed for some queries (n, heads, tokens, size) at a time."""

    def compute(
        module: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **more: Any,
    ) -> Any:
        (n, heads, queries, _), keys = query.shape, key.shape[-2]
        if n * heads * queries * keys <= MAX_ELEMENTS:
            return attention(module, query, key, value, attention_mask, *args, **more)
        outputs = [
            attention(module, query[:, :, span], key, value, _take_rows(attention_mask, span, queries), *args, **more)[
                0
            ]
            for span in _list_spans(queries, MAX_ELEMENTS // (n * heads * keys))
        ]
        return torch.cat(outputs, 1), None

    return compute


def _list_spans(queries: int, step: int) -> list[slice]:
    return [slice(first, first + max(step, 1)) for first in range(0, queries, max(step, 1))]


def _take_rows(mask: Tensor | None, span: slice, queries: int) -> Tensor | None:
    """Return the rows of a mask, (…, queries or 1, keys), that belong to some queries."""
    return mask if mask is None or mask.shape[-2] != queries else mask[..., span, :]


def _share_masks(make: Callable[..., Any], known: "list[weakref.ref[Tensor]]") -> Callable[..., Any]:
    """Return a function that makes masks, or returns an equal one that is still in use."""

    def compute(*args: Any, **more: Any) -> Any:
        mask = make(*args, **more)
        if not isinstance(mask, Tensor) or mask.numel() < MIN_SHARED_ELEMENTS:
            return mask
        known[:] = [ref for ref in known if ref() is not None]
        alike = [other for ref in known if (other := ref()) is not None and other.dtype == mask.dtype]
        same = next((other for other in alike if torch.equal(other, mask)), None)
        if same is not None:
            return same
        known.append(weakref.ref(mask))
        return mask

    return compute
