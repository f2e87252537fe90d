"""The choice of layers to leave unquantized, by the error that this removes per added byte."""

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
# Without a budget, layers are proposed only if at most FEW cause MOST_ERROR of the error and add LITTLE to the bytes.
FEW = 5
MOST_ERROR = 0.5
LITTLE = 0.1
LEAST_GAIN = 0.01  # share of the error that one more layer must gain beyond its share of the bytes
KNEE, WORTHWHILE = 0.95, 2 / 3  # a budget is not filled if 2/3 of its bytes give 95 % of its gain

# Plain floats: name in a report → name in a file.
DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class KeptLayer(NamedTuple):
    """A layer to store as in the original."""

    name: str
    added: int  # bytes in addition to the quantized size
    error: float  # Σe² that keeping it removes


class Budget(NamedTuple):
    """Limit for keeping layers: the bytes that it may cost, or the gain in dB that it must reach."""

    amount: float
    is_gain: bool = False


def parse_budget(text: str) -> Budget:
    """Parse ``500MiB``, ``1.5GB`` or ``1000000`` as bytes, and ``3dB`` as a gain in SNR.

    Raises:
        UsageError: the text is neither, or the amount is not positive.
    """
    amount, unit = parse_amount(text)
    if unit not in {*UNITS, DB}:
        raise UsageError(f"--keep-original {display(text)}: give bytes, such as 500MiB, or a gain, such as 3dB")
    return Budget(amount, is_gain=True) if unit == DB else Budget(amount * UNITS[unit])


def order_by_worth(layers: Iterable[KeptLayer], most: int = maxsize) -> list[KeptLayer]:
    """Return the layers, at most ``most``, in the order in which they are worth keeping: the most error per byte first.

    For each n, the first n layers leave the least error that any choice of as many bytes can leave (the greedy solution
    of a knapsack whose budget they fill exactly).
    """
    changed = [layer for layer in layers if layer.error > 0]
    return nsmallest(most, changed, key=lambda layer: (max(layer.added, 0) / layer.error, -layer.error))


def choose_within(ordered: Sequence[KeptLayer], given: Budget, error: float) -> list[KeptLayer]:
    """Choose the layers to keep within a budget.

    A budget of bytes removes the most error; a gain is reached with the fewest bytes, or with all layers. The choice is
    optimal except for instances that util/knapsack.py does not solve completely.

    Args:
        ordered: layers from :func:`order_by_worth`.
        given: the budget.
        error: Σe² of all layers, including layers that cannot be kept.
    """
    if given.is_gain:
        gone = error * (1 - 10 ** (-given.amount / 10))
        left = sum(layer.error for layer in ordered) - gone
        groups = [[KnapsackItem(layer.error, 0.0), KnapsackItem(0.0, float(max(layer.added, 0)))] for layer in ordered]
        found = solve(groups, left)
    else:
        groups = [[KnapsackItem(0.0, layer.error), KnapsackItem(float(max(layer.added, 0)), 0.0)] for layer in ordered]
        found = solve(groups, given.amount)
    if found is None:
        return list(ordered)
    return [layer for layer, pick in zip(ordered, found.picks, strict=True) if pick]


def cut_at_knee(found: Sequence[KeptLayer]) -> list[KeptLayer]:
    """Return the fewest layers that gain almost everything, if the others would cost much for little; otherwise all."""
    gained, added = sum(layer.error for layer in found), sum(max(layer.added, 0) for layer in found)
    error, cost = 0.0, 0
    for n, layer in enumerate(found, 1):
        error, cost = error + layer.error, cost + max(layer.added, 0)
        if error >= KNEE * gained:
            return list(found[:n]) if cost <= WORTHWHILE * added else list(found)
    return list(found)


def choose_few(ordered: Sequence[KeptLayer], error: float, nbytes: int) -> list[KeptLayer]:
    """Return a few layers that cause most of the error and cost little to keep; empty if there are none.

    The choice ends where another layer would gain less than its share of the bytes.

    Args:
        ordered: layers from :func:`order_by_worth`.
        error: Σe² of all layers.
        nbytes: size of the quantized checkpoint.
    """
    best, best_gain = 0, -inf
    gone, added, whole = 0.0, 0, sum(max(layer.added, 0) for layer in ordered) or 1
    for n, layer in enumerate(ordered[:FEW], 1):
        gone, added = gone + layer.error, added + layer.added
        gain = gone / error - added / whole
        if gone >= MOST_ERROR * error and added <= LITTLE * nbytes and gain > best_gain + LEAST_GAIN:
            best, best_gain = n, gain
    return list(ordered[:best])


def list_keepable(layers: Iterable[Layer], findings: Iterable[Finding]) -> list[KeptLayer]:
    """Return the layers with a finite error that can be kept alone, and are not stored as in the original already."""
    bound, found = find_bound_layers(findings), []
    for layer in layers:
        is_kept = layer.quantized_dtype == layer.original_dtype and layer.original_dtype in DTYPES
        if layer.squared_error is not None and layer.layer_name not in bound and not is_kept:
            sizes = find_sizes(layer)
            found.append(KeptLayer(layer.layer_name, sizes.original - sizes.quantized, layer.squared_error))
    return found


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
    """Return layers whose scales are folded into another tensor, and these tensors: none can be kept alone."""
    folded = [finding for finding in findings if finding.code == "folded_scales"]
    return {name for f in folded for name in (f.layer, *f.evidence["layers"]) if name is not None}
