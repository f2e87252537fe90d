"""Which layers to leave unquantized: those that give back the most error for the bytes that they cost."""

import re
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.knapsack import KnapsackItem, solve
from quanterr.report.base import Finding
from quanterr.util.text import display

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DB = "db"
FEW = 5  # layers that are proposed at once; to be kept without a budget being given,
MOST_ERROR = 0.5  # if they make at least this share of the error
LITTLE = 0.05  # and add at most this share of the bytes
KNEE, WORTHWHILE = 0.95, 2 / 3  # of what a budget gains, and of its bytes: with so much for so little it is not filled

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


class Budget(NamedTuple):
    """What keeping layers may cost in bytes, or what it shall gain in dB."""

    amount: float
    is_gain: bool = False


def budget(text: str) -> Budget:
    """``500MiB``, ``1.5GB``, ``1000000``: bytes; ``3dB``: so much more SNR.

    Raises:
        UsageError: neither, or not more than 0.
    """
    amount, unit = amount_of(text)
    if unit not in {*UNITS, DB}:
        raise UsageError(f"--keep-original {display(text)}: give bytes, such as 500MiB, or a gain, such as 3dB")
    return Budget(amount, is_gain=True) if unit == DB else Budget(amount * UNITS[unit])


def amount_of(text: str) -> tuple[float, str]:
    """A number above 0 and its unit, in small letters; of anything else 0 and a question mark."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([a-z]*)", text.strip().lower())
    amount = float(found[1]) if found else 0.0
    return (amount, found[2]) if found and isfinite(amount) and amount > 0 else (0.0, "?")


def original_bytes(dtype: str, elements: int) -> int:
    """What a weight takes in the original."""
    _, bits = DTYPES.get(dtype, ("", USUAL_BITS))
    return elements * bits // 8


def stored_bytes(bits_per_weight: float | None, elements: int) -> int:
    """What a weight takes in the quantized checkpoint."""
    return round((bits_per_weight or 0) * elements / 8)


def dtype_name(dtype: str) -> str:
    """What a file calls a dtype of a report: ``BF16``."""
    return DTYPES.get(dtype, (dtype, 0))[0]


def by_worth(layers: Iterable[Kept]) -> list[Kept]:
    """In the order in which they are worth keeping: the most error for a byte first.

    The first n have the least error left that any choice of as many bytes can leave (the greedy solution of a
    knapsack whose budget they fill exactly).
    """
    return sorted((layer for layer in layers if layer.error > 0), key=lambda layer: (_price(layer), -layer.error))


def _price(layer: Kept) -> float:
    return max(layer.added, 0) / layer.error


def within(ordered: Sequence[Kept], given: Budget, error: float) -> list[Kept]:
    """The layers to keep under a budget, of those that :func:`by_worth` ordered.

    Of bytes: those that remove the most error. Of a gain: those that give it for the fewest bytes, or all. The answer
    is the best there is, but for instances that quanterr/knapsack.py does not solve to the end. ``error``: Σe² of
    the whole, these and all other layers.
    """
    if given.is_gain:
        gone = error * (1 - 10 ** (-given.amount / 10))  # as much at least
        left = sum(layer.error for layer in ordered) - gone
        groups = [[KnapsackItem(layer.error, 0.0), KnapsackItem(0.0, float(max(layer.added, 0)))] for layer in ordered]
        found = solve(groups, left)
    else:
        groups = [[KnapsackItem(0.0, layer.error), KnapsackItem(float(max(layer.added, 0)), 0.0)] for layer in ordered]
        found = solve(groups, given.amount)
    if found is None:
        return list(ordered)
    return [layer for layer, pick in zip(ordered, found.picks, strict=True) if pick]


def to_the_knee(found: Sequence[Kept]) -> list[Kept]:
    """Those without the long tail: the fewest that gain almost all, where the others would cost much for little."""
    gained, added = sum(layer.error for layer in found), sum(max(layer.added, 0) for layer in found)
    error, cost = 0.0, 0
    for n, layer in enumerate(found, 1):
        error, cost = error + layer.error, cost + max(layer.added, 0)
        if error >= KNEE * gained:
            return list(found[:n]) if cost <= WORTHWHILE * added else list(found)
    return list(found)


def few(ordered: Sequence[Kept], error: float, nbytes: int) -> list[Kept]:
    """A few layers that make most of the error and cost little to keep, if there are such."""
    for n in range(1, FEW + 1):
        if sum(layer.error for layer in ordered[:n]) >= MOST_ERROR * error:
            return list(ordered[:n]) if sum(layer.added for layer in ordered[:n]) <= LITTLE * nbytes else []
    return []


def bound_layers(findings: Iterable[Finding]) -> set[str]:
    """Layers whose scales are in a norm or another layer of the same checkpoint, and those: none can be kept alone."""
    folded = [finding for finding in findings if finding.code == "folded_scales"]
    return {name for f in folded for name in (f.layer, *f.evidence["layers"]) if name is not None}
