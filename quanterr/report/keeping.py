"""Which layers to leave unquantized: those that give back the most error for the bytes that they cost."""

from collections.abc import Iterable, Sequence
from math import log10
from typing import NamedTuple

from quanterr.report.model import Finding

# Plain floats by their names in a report: what they are called in a file, and the bits of an element.
DTYPES = {
    "torch.float64": ("F64", 64),
    "torch.float32": ("F32", 32),
    "torch.float16": ("F16", 16),
    "torch.bfloat16": ("BF16", 16),
}
USUAL_BITS = 16  # of an original that is no plain float


class Kept(NamedTuple):
    """A layer as the original stores it."""

    name: str
    added: int  # bytes, more than it has quantized
    error: float  # Σe² that goes away


def original_bytes(dtype: str, elements: int) -> int:
    """What a weight takes in the original."""
    _, bits = DTYPES.get(dtype, ("", USUAL_BITS))
    return elements * bits // 8


def by_worth(layers: Iterable[Kept]) -> list[Kept]:
    """In the order in which they are worth keeping: the most error for a byte first.

    The first n have the least error left that any choice of as many bytes can leave (the greedy solution of a
    knapsack whose budget they fill exactly).
    """
    return sorted((layer for layer in layers if layer.error > 0), key=lambda layer: (_price(layer), -layer.error))


def _price(layer: Kept) -> float:
    return max(layer.added, 0) / layer.error


def within(ordered: Sequence[Kept], budget: int) -> list[Kept]:
    """Layers that cost at most ``budget`` bytes together: each that still fits, in their order."""
    chosen = []
    for layer in ordered:
        if max(layer.added, 0) <= budget:
            chosen.append(layer)
            budget -= layer.added
    return chosen


def until(ordered: Sequence[Kept], error: float, gain_db: float) -> list[Kept] | None:
    """The first layers without which the SNR is higher by ``gain_db``; None: not even without all of them.

    ``error``: Σe² of all layers together.
    """
    left = error
    for n, layer in enumerate(ordered, 1):
        left -= layer.error
        if left <= 0 or 10 * log10(error / left) >= gain_db:
            return list(ordered[:n])
    return None


def bound_layers(findings: Iterable[Finding]) -> set[str]:
    """Layers whose scales are in a norm or another layer of the same checkpoint, and those: none can be kept alone."""
    folded = [finding for finding in findings if finding.code == "folded_scales"]
    return {name for f in folded for name in (f.layer, *f.evidence["layers"]) if name is not None}
