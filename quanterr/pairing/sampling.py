"""How far two weights are apart, measured on a few rows; which of several readings the original bears out."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.formats import Weight
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

Workspaces = tuple[Workspace, Workspace]

# Relative error ||e|| / ||x||: right readings are below the first, and wrong ones this many times worse.
SUSPICIOUS = 0.35
BETTER = 3.0

# Of a square weight and its transpose, or of two orders of rows: the right one is below the first, even at two
# bits, the other above the second.
RELATED, UNRELATED = 0.7, 1.2

# Readings that differ by one step of the codes (rounding is a third of a step, one step more thrice as much) or in
# the edges of blocks: the wrong one cannot be nearer by this factor.
CLEARLY = 1.2

# A tensor and its copy, in another dtype perhaps.
SAME = 0.01


class Bar(NamedTuple):
    """When another reading takes the place of the first, by the relative errors of both on a sample."""

    tried_above: float  # at this error of the first or below, no other is tried
    times_better: float = inf
    apart: bool = False  # or: the other is below RELATED, the first above UNRELATED
    unless_same: bool = False  # instead: the other is no copy; its error alone decides

    def is_met(self, first: float, other: float) -> bool:
        """Whether the other reading wins."""
        if self.unless_same:
            return other > SAME
        better = other < first and self.times_better * other <= first
        return better or (self.apart and other < RELATED < UNRELATED < first)


READING = Bar(SUSPICIOUS, BETTER)
CLOSE_READING = Bar(-1.0, CLEARLY)
ORDER = Bar(SUSPICIOUS, BETTER, apart=True)
VALUES = Bar(-1.0, BETTER, apart=True)
TRANSPOSITION = Bar(UNRELATED, apart=True)
NO_COPY = Bar(-1.0, unless_same=True)


class Choice(NamedTuple):
    """Which reading the original bears out: the number of an alternative, or None for the first."""

    number: int | None
    first: float  # relative error of the first
    least: float  # that of the nearest of all that were tried


def nearest(
    first: tuple[Weight, Weight], others: Sequence[tuple[Weight, Weight]], bar: Bar, workspaces: "Workspaces"
) -> Choice:
    """Which of several pairs of an original and a quantized weight to take, by their errors on a few rows."""
    error = relative_error(*first, workspaces)
    if error <= bar.tried_above or not others:
        return Choice(None, error, error)
    errors = [relative_error(*other, workspaces) for other in others]
    least = min(errors)
    return Choice(errors.index(least) if bar.is_met(error, least) else None, error, least)


PLACES, ROWS, ELEMENTS = 4, 8, 1 << 15  # of a sample: places, rows and elements at each


@contextmanager
def on_cpu() -> Iterator[Workspaces]:
    """Where rows of two weights are read, on the CPU."""
    with torch.inference_mode():
        yield Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))


def relative_error(original: Weight, quantized: Weight, workspaces: Workspaces) -> float:
    """||y - x|| / ||x|| over a few rows; infinity where something is not finite, or only x is zero."""
    signal = noise = 0.0
    for chunk in _sample(*original.matrix):
        x = original.dequantize(chunk, workspaces[0]).weight.double()
        e = quantized.dequantize(chunk, workspaces[1]).weight.double() - x
        signal, noise = signal + float((x * x).sum()), noise + float((e * e).sum())
    if not isfinite(noise) or not isfinite(signal):
        return inf
    if not signal:
        return inf if noise else 0.0
    return sqrt(noise / signal)


def sampled_row_factors(original: Weight, quantized: Weight, workspaces: Workspaces) -> tuple[Tensor, float]:
    """The factor of each of a few rows that brings the original nearest, float64; how far rounding moves it."""
    xx, xy, yy = _row_products(original, quantized, workspaces)
    kept = xx > 0
    factors = xy[kept] / xx[kept]
    rest = (yy[kept] - factors * xy[kept]).clamp_(0).sum() / yy[kept].sum()
    return factors, sqrt(float(rest) / original.matrix[1]) if len(factors) and isfinite(rest) else inf


def error_beside_row_factors(original: Weight, quantized: Weight, workspaces: Workspaces) -> float:
    """||y - x|| / ||x|| over a few rows, each of them first brought as near as a factor can; or infinity."""
    xx, xy, yy = _row_products(original, quantized, workspaces)
    noise = (xx - (xy * xy / yy).nan_to_num(0.0, inf, inf)).clamp_(0).sum()
    error = float((noise / xx.sum()).sqrt())
    return error if isfinite(error) else inf


def error_beside_factor(original: Weight, quantized: Weight, workspaces: Workspaces) -> float:
    """||y - x|| / ||x|| over a few rows, all of them first brought as near as one factor can; or infinity."""
    xx, xy, yy = (float(products.sum()) for products in _row_products(original, quantized, workspaces))
    error = max(xx - xy * xy / yy, 0.0) / xx if xx and yy and xy > 0 else inf
    return sqrt(error) if isfinite(error) else inf


def _row_products(original: Weight, quantized: Weight, workspaces: Workspaces) -> tuple[Tensor, Tensor, Tensor]:
    """x · x, x · y and y · y of a few rows, float64."""
    found = []
    for chunk in _sample(*original.matrix):
        x = original.dequantize(chunk, workspaces[0]).weight.double()
        y = quantized.dequantize(chunk, workspaces[1]).weight.double()
        found.append(torch.stack(((x * x).sum(1), (x * y).sum(1), (y * y).sum(1))))
    xx, xy, yy = torch.cat(found, 1) if found else torch.zeros(3, 0, dtype=torch.float64)
    return xx, xy, yy


def sampled_rows(rows: int, cols: int) -> list[tuple[int, int]]:
    """Return the first and last row of each chunk of a sample."""
    return [(chunk.row, chunk.stop_row) for chunk in _sample(rows, cols)]


def _sample(rows: int, cols: int) -> Iterable[Chunk]:
    """A few chunks, spread over the rows."""
    step = max(-(-rows // PLACES), 1)
    n = max(min(ROWS, ELEMENTS // max(cols, 1)), 1)
    for row in range(0, rows, step):
        yield Chunk(row, min(row + n, rows), 0, cols if n > 1 else min(cols, ELEMENTS))
