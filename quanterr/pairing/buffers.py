"""Computed buffers: tensors that a model computes when it is built, so that some programs do not save them.

    position_ids, token_type_ids     (1, n) or (n,)       0, 1, 2, …; zeros
    inv_freq                         (n,)                 b^(-2i/d): a geometric series
    attn.bias, causal_mask           (1, 1, n, n)         ones on and below the diagonal
    masked_bias                      ()                   a large negative number
    relative_position_index          (w², w²), (w² + 1, …)  relative positions of the pairs in a window

A tensor with such a name but other values is not a computed buffer.

Reference: huggingface/transformers@5.23.0 models/bert, gpt2, gpt_neox, llama, swin and beit (modeling_*.py).
"""

import re
from collections.abc import Callable
from math import isqrt

from quanterr.checkpoints import Entry
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import TORCH_DTYPES, read_entry

MAX_CHECKED_BYTES = 1 << 26  # larger buffers are not read
BF16_TOLERANCE = 2.0**-7  # relative tolerance: the numbers may have been cast to BF16
MAX_MASKED_BIAS = -1e4  # masked_bias is at most this


def is_computed(entry: Entry) -> bool:
    """Return whether an entry has the name and the values of a computed buffer."""
    holds = next((holds for name, holds in BUFFERS if re.search(name, entry.name)), None)
    if holds is None or entry.dtype not in TORCH_DTYPES or not 0 < entry.nbytes <= MAX_CHECKED_BYTES:
        return False
    return holds(read_entry(entry).double())


def _are_positions(values: Tensor) -> bool:
    return torch.equal(values.flatten(), torch.arange(values.numel()).double())


def _are_zeros(values: Tensor) -> bool:
    return not bool(values.any())


def _are_frequencies(values: Tensor) -> bool:
    if values.dim() != 1 or len(values) < 2 or not bool((values > 0).all()) or float(values[0]) > 1:
        return False
    steps = torch.linspace(0, 1, len(values), dtype=torch.float64)
    series = values[0] * (values[-1] / values[0]) ** steps
    return bool((values[-1] < values[0]) & ((values / series - 1).abs() <= BF16_TOLERANCE).all())


def _are_causal(values: Tensor) -> bool:
    return values.dim() >= 2 and torch.equal(values, torch.ones_like(values).tril())


def _is_masked(values: Tensor) -> bool:
    return values.numel() == 1 and float(values) <= MAX_MASKED_BIAS


def _are_places(values: Tensor) -> bool:
    """Return whether values are the relative positions in a square window; BEiT adds three for a class token."""
    n = values.shape[-1]
    if values.dim() != 2 or values.shape[0] != n:
        return False
    width = isqrt(n)
    row, col = (torch.arange(width * width) // width, torch.arange(width * width) % width)
    between = (row[:, None] - row + width - 1) * (2 * width - 1) + (col[:, None] - col + width - 1)
    if n == width * width:
        return torch.equal(values, between.double())
    last = (2 * width - 1) ** 2 + 2
    beside = values[0, 0] == last and bool((values[0, 1:] == last - 2).all() & (values[1:, 0] == last - 1).all())
    return n == width * width + 1 and bool(beside) and torch.equal(values[1:, 1:], between.double())


BUFFERS: tuple[tuple[str, Callable[[Tensor], bool]], ...] = (
    (r"(^|[._])position_ids$", _are_positions),
    (r"(^|\.)token_type_ids$", _are_zeros),
    (r"(^|[._])inv_freq$", _are_frequencies),
    (r"(^|\.)(attn|attention|self_attention)\.(bias|causal_mask)$", _are_causal),
    (r"(^|\.)masked_bias$", _is_masked),
    (r"(^|\.)relative_position_index$", _are_places),
)
