"""The choice of layers to leave unquantized, by the error that each removes per added byte."""

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from math import fsum, inf
from sys import maxsize
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.documents.comparison.layer import Layer, find_sizes
from quanterr.documents.comparison.model import Report
from quanterr.errors import UsageError
from quanterr.util.amounts import UNITS, parse_amount
from quanterr.util.knapsack import KnapsackItem, solve
from quanterr.util.text import display

DB = "db"
# Without a budget, layers are proposed only if at most MAX_PROPOSED of them cause MIN_ERROR_SHARE of the error, and add
# at most MAX_ADDED_SHARE to the bytes.
MAX_PROPOSED = 5
MIN_ERROR_SHARE = 0.5
MAX_ADDED_SHARE = 0.1
MIN_GAIN = 0.01  # share of the error that one more layer must remove beyond its share of the bytes
KNEE_GAIN, KNEE_COST = 0.95, 2 / 3  # a budget is not used up if 2/3 of its bytes bring 95 % of its gain

# Plain floats: name in a report → name in a file.
DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class KeptLayer(NamedTuple):
    """A layer to store as in the original."""

    name: str
    added: int  # bytes in addition to the quantized size
    error: float  # Σe² that keeping it removes


class Budget(NamedTuple):
    """The limit for keeping layers: the bytes that may be added, or the gain in dB that must be reached."""

    amount: float
    is_gain: bool = False


def parse_budget(text: str) -> Budget:
    """Parse ``500MiB``, ``1.5GB`` or ``1000000`` as bytes, and ``3dB`` as a gain in SNR.

    Raises:
        UsageError: the text is neither a size nor a gain in dB, or the amount is not positive.
    """
    amount, unit = parse_amount(text)
    if unit not in {*UNITS, DB}:
        raise UsageError(f"--keep-original {display(text)}: give bytes, such as 500MiB, or a gain, such as 3dB")
    return Budget(amount, is_gain=True) if unit == DB else Budget(amount * UNITS[unit])


def order_by_worth(layers: Iterable[KeptLayer], limit: int = maxsize) -> list[KeptLayer]:
    """Return the layers, at most ``limit``, ordered by the error that each removes per byte, the largest first.

    For each n, no other choice with as many bytes leaves less error than the first n layers, which are the greedy
    solution of a knapsack that they fill exactly.
    """
    changed = [layer for layer in layers if layer.error > 0]
    return nsmallest(limit, changed, key=lambda layer: (max(layer.added, 0) / layer.error, -layer.error))


def choose_within(ordered: Sequence[KeptLayer], given: Budget, error: float) -> list[KeptLayer]:
    """Choose the layers to keep within a budget.

    With a budget of bytes, the maximum error is removed; a gain is reached with the minimum number of bytes, or with
    all layers. The choice is optimal except for instances that util/knapsack.py does not solve completely.

    Args:
        ordered: layers from :func:`order_by_worth`.
        given: the budget.
        error: Σe² of all layers, including layers that cannot be kept.
    """
    if given.is_gain:
        gone = error * (1 - 10 ** (-given.amount / 10))
        left = sum(layer.error for layer in ordered) - gone
        groups = [[KnapsackItem(layer.error, 0.0), KnapsackItem(0.0, float(max(layer.added, 0)))] for layer in ordered]
        solution = solve(groups, left)
    else:
        groups = [[KnapsackItem(0.0, layer.error), KnapsackItem(float(max(layer.added, 0)), 0.0)] for layer in ordered]
        solution = solve(groups, given.amount)
    if solution is None:
        return list(ordered)
    return [layer for layer, pick in zip(ordered, solution.picks, strict=True) if pick]


def cut_at_knee(layers: Sequence[KeptLayer]) -> list[KeptLayer]:
    """Return the first layers that gain almost everything, if the others cost much for little gain; otherwise all."""
    gained, added = sum(layer.error for layer in layers), sum(max(layer.added, 0) for layer in layers)
    error, cost = 0.0, 0
    for n, layer in enumerate(layers, 1):
        error, cost = error + layer.error, cost + max(layer.added, 0)
        if error >= KNEE_GAIN * gained:
            return list(layers[:n]) if cost <= KNEE_COST * added else list(layers)
    return list(layers)


def choose_few(ordered: Sequence[KeptLayer], error: float, nbytes: int) -> list[KeptLayer]:
    """Return a few layers that cause a large part of the error and add few bytes; empty if there are none.

    The choice ends where another layer would gain less than its share of the bytes.

    Args:
        ordered: layers from :func:`order_by_worth`.
        error: Σe² of all layers.
        nbytes: size of the quantized checkpoint.
    """
    best, best_gain = 0, -inf
    gone, added, whole = 0.0, 0, sum(max(layer.added, 0) for layer in ordered) or 1
    for n, layer in enumerate(ordered[:MAX_PROPOSED], 1):
        gone, added = gone + layer.error, added + layer.added
        gain = gone / error - added / whole
        if gone >= MIN_ERROR_SHARE * error and added <= MAX_ADDED_SHARE * nbytes and gain > best_gain + MIN_GAIN:
            best, best_gain = n, gain
    return list(ordered[:best])


def list_keepable(layers: Iterable[Layer], findings: Iterable[Finding]) -> list[KeptLayer]:
    """Return the layers with a finite error that can be kept alone and that are not stored as in the original.

    Floats of more bits than the original's are no quantized layers, but the result of dequantizing some.
    """
    bound, keepable = find_bound_layers(findings), []
    for layer in layers:
        sizes = find_sizes(layer)
        added = sizes.original - sizes.quantized
        is_kept = layer.quantized_dtype in DTYPES and (layer.quantized_dtype == layer.original_dtype or added < 0)
        if layer.squared_error is not None and layer.layer_name not in bound and not is_kept:
            keepable.append(KeptLayer(layer.layer_name, added, layer.squared_error))
    return keepable


def propose_kept(report: Report) -> tuple[list[KeptLayer], float]:
    """Return the few layers that are worth keeping as in the original, and Σe² of all layers."""
    total = fsum(layer.squared_error for layer in report.layers if layer.squared_error is not None)
    free = list_keepable(report.layers, report.findings)
    return (choose_few(order_by_worth(free), total, report.quantized.bytes) if total else []), total


def find_common_dtype(report: Report) -> str | None:
    """Return the name in files of the float dtype in which the original stores all layers; None if there is none."""
    dtypes = {DTYPES.get(layer.original_dtype) for layer in report.layers}
    return dtypes.pop() if len(dtypes) == 1 else None


def find_bound_layers(findings: Iterable[Finding]) -> set[str]:
    """Return layers whose scales are folded into another tensor, and these tensors, which cannot be kept alone."""
    folded = [finding for finding in findings if finding.code == "folded_scales"]
    return {name for f in folded for name in (f.layer, *f.evidence["layers"]) if name is not None}
