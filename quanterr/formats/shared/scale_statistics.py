"""Statistics of a weight's stored scales: their number, how many are invalid, their mean and range."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite
from typing import NamedTuple

from quanterr.lazy_torch import torch
from quanterr.metrics.sums import as_float, exact


class ScaleStatistics(NamedTuple):
    """Statistics of a weight's scales; ``mean`` is the mean of the finite scales, None if there are none."""

    number: int
    nonfinite: int
    zero: int
    negative: int
    mean: float | None
    low: float
    high: float

    @classmethod
    def compute(cls, pieces: Iterable[torch.Tensor]) -> ScaleStatistics:
        """Compute the statistics of scales, float32, which come in several tensors."""
        number = nonfinite = zero = negative = total = 0
        low, high = inf, -inf
        for piece in pieces:
            number += piece.numel()
            if piece.numel() == 1 and isfinite(value := float(piece)):  # the usual case
                zero, negative = zero + (value == 0), negative + (value < 0)
                total, low, high = total + exact(value), min(low, value), max(high, value)
                continue
            finite = piece.double()
            lowest, highest = _find_bounds(finite)
            if not (isfinite(lowest) and isfinite(highest)):
                finite = finite[finite.isfinite()]
                nonfinite += piece.numel() - finite.numel()
                lowest, highest = _find_bounds(finite)
            low, high = min(low, lowest), max(high, highest)
            total += exact(float(finite.sum()))
            if lowest <= 0:
                zero, negative = zero + int((finite == 0).sum()), negative + int((finite < 0).sum())
        mean = None
        if number > nonfinite:
            mean = low if low == high else as_float(total) / (number - nonfinite)
        return cls(number, nonfinite, zero, negative, mean, low, high)


def _find_bounds(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value; both are NaN if any value is."""
    if not values.numel():
        return inf, -inf
    lowest, highest = torch.aminmax(values)
    return float(lowest), float(highest)
