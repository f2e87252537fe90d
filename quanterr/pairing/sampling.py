"""Errors between two weights on a sample of rows, and the choice of the interpretation with the smallest error."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from math import inf, isfinite, sqrt
from typing import NamedTuple

from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk

# Relative errors ||e|| / ||x||: a correct interpretation's is below SUSPICIOUS, a wrong one's BETTER times larger.
SUSPICIOUS = 0.35
BETTER = 3.0

# Relative errors of a square weight and its transpose, or of two orders of rows: that of the correct one is below
# RELATED, even at two bits, and that of the other above UNRELATED.
RELATED, UNRELATED = 0.7, 1.2

# Interpretations may differ by one code step (rounding errs by a third of a step, a wrong interpretation by a whole
# step) or only at the edges of blocks: the error of the wrong one cannot be smaller by this factor.
CLEARLY = 1.2

# Largest relative error between a tensor and its copy, perhaps in another dtype.
SAME = 0.01


class InterpretationThreshold(NamedTuple):
    """The condition under which another interpretation replaces the first; relative errors are those on a sample."""

    tried_above: float  # others are tried only if the first has a larger error
    times_better: float = inf  # factor by which the other's error must be smaller
    apart: bool = False  # also accept the other if its error is below RELATED and that of the first above UNRELATED
    unless_same: bool = False  # instead, accept the other if its error is above SAME, so that it is not a copy

    def is_met(self, first: float, other: float) -> bool:
        """Return whether the other interpretation wins."""
        if self.unless_same:
            return other > SAME
        better = other < first and self.times_better * other <= first
        return better or (self.apart and other < RELATED < UNRELATED < first)


CLOSE_INTERPRETATION = InterpretationThreshold(-1.0, CLEARLY)
ORDER = InterpretationThreshold(SUSPICIOUS, BETTER, apart=True)
VALUES = InterpretationThreshold(-1.0, BETTER, apart=True)
TRANSPOSITION = InterpretationThreshold(UNRELATED, apart=True)
NO_COPY = InterpretationThreshold(-1.0, unless_same=True)


class ChosenInterpretation(NamedTuple):
    """The chosen interpretation: the index of an alternative, or None for the first."""

    number: int | None
    first: float  # relative error of the first interpretation
    min_error: float  # smallest relative error of the interpretations tried


def choose_nearest(
    first: tuple[Weight, Weight],
    others: Iterable[tuple[Weight, Weight]],
    bar: InterpretationThreshold,
    reader: Reader,
) -> ChosenInterpretation:
    """Choose among (original, quantized) pairs by their errors on a few rows; ``bar`` decides if others are tried."""
    if bar.tried_above >= SUSPICIOUS and 0 < (error := _error_of_first_rows(*first, reader)) <= SUSPICIOUS:
        return ChosenInterpretation(None, error, error)  # where these rows are right, every other one is wrong
    error = relative_error(*first, reader)
    errors = [] if error <= bar.tried_above else [relative_error(*other, reader) for other in others]
    if not errors:
        return ChosenInterpretation(None, error, error)
    min_error = min(errors)
    return ChosenInterpretation(errors.index(min_error) if bar.is_met(error, min_error) else None, error, min_error)


# Number of places in a sample, and maximum number of rows and elements at a place.
PLACES, ROWS, ELEMENTS = 4, 8, 1 << 15


def relative_error(original: Weight, quantized: Weight, reader: Reader) -> float:
    """Return ||y - x|| / ||x|| over a few rows; infinity if a value is not finite, or only x is all zeros."""
    return _pool_errors(_measure_error(x, y) for x, y in _read_sample(original, quantized, reader))


def _error_of_first_rows(original: Weight, quantized: Weight, reader: Reader) -> float:
    """Return ||y - x|| / ||x|| over only the first rows of the sample."""
    weights, first = (original, quantized), islice(_choose_chunks(*original.matrix), 1)
    return _pool_errors(reader.measure_error(weights, chunk) for chunk in first)


def _measure_error(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return Σx² and Σ(y - x)² of float64 tensors."""
    x, e = x.flatten(), (y - x).flatten()
    return float(x.dot(x)), float(e.dot(e))


def _pool_errors(energies: Iterable[tuple[float, float]]) -> float:
    """Return ||y - x|| / ||x|| over pieces with these Σx² and Σ(y - x)²; infinity as in :func:`relative_error`."""
    signal = noise = 0.0
    for x_sq, e_sq in energies:
        signal, noise = signal + x_sq, noise + e_sq
    if not isfinite(noise) or not isfinite(signal):
        return inf
    if not signal:
        return inf if noise else 0.0
    return sqrt(noise / signal)


def fit_row_factors(original: Weight, quantized: Weight, reader: Reader) -> tuple[Tensor, float]:
    """Fit a factor for each of a few rows, float64, that maps x to y; also return its uncertainty from rounding."""
    xx, xy, yy = _sum_row_products(original, quantized, reader)
    kept = xx > 0
    factors = xy[kept] / xx[kept]
    rest = (yy[kept] - factors * xy[kept]).clamp_(0).sum() / yy[kept].sum()
    return factors, sqrt(float(rest) / original.matrix[1]) if len(factors) and isfinite(rest) else inf


def error_up_to_row_factors(original: Weight, quantized: Weight, reader: Reader) -> float:
    """Return ||y - x|| / ||x|| over a few rows after fitting a factor to each row; infinity if undefined."""
    xx, xy, yy = _sum_row_products(original, quantized, reader)
    noise = (xx - (xy * xy / yy).nan_to_num(0.0, inf, inf)).clamp_(0).sum()
    error = float((noise / xx.sum()).sqrt())
    return error if isfinite(error) else inf


def error_up_to_factor(original: Weight, quantized: Weight, reader: Reader) -> float:
    """Return ||y - x|| / ||x|| over a few rows after fitting one common factor; infinity if undefined."""
    xx, xy, yy = (float(products.sum()) for products in _sum_row_products(original, quantized, reader))
    error = max(xx - xy * xy / yy, 0.0) / xx if xx and yy and xy > 0 else inf
    return sqrt(error) if isfinite(error) else inf


def _sum_row_products(original: Weight, quantized: Weight, reader: Reader) -> tuple[Tensor, Tensor, Tensor]:
    """Return x · x, x · y and y · y for each of a few rows, float64."""
    if not original.n:
        xx, xy, yy = torch.zeros(3, 0, dtype=torch.float64)
        return xx, xy, yy
    x, y = map(torch.cat, zip(*_read_sample(original, quantized, reader), strict=True))
    return (x * x).sum(1), (x * y).sum(1), (y * y).sum(1)


def _read_sample(original: Weight, quantized: Weight, reader: Reader) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield both sides of the sampled chunks, (r, c) float64 each; a small weight is read at once."""
    weights = original, quantized
    if 0 < original.n <= ELEMENTS:
        chunk, rows = _sample_at_once(*original.matrix)
        x, y = (side.index_select(0, rows).double() for side in reader.read_both(weights, chunk))
        yield x, y
        return
    for chunk in _choose_chunks(*original.matrix):
        x, y = (side.double() for side in reader.read_both(weights, chunk))
        yield x, y


@lru_cache
def _sample_at_once(rows: int, cols: int) -> tuple[Chunk, Tensor]:
    """Return the chunk of a small weight that is read, and the numbers of the sampled rows in it."""
    chunks = list(_choose_chunks(rows, cols))
    first, last = chunks[0], chunks[-1]
    numbers = [row - first.row for chunk in chunks for row in range(chunk.row, chunk.stop_row)]
    return Chunk(first.row, last.stop_row, first.col, first.stop_col), torch.tensor(numbers)


def sampled_rows(rows: int, cols: int) -> list[tuple[int, int]]:
    """Return the first and the stop row of each piece of a sample that is read; a small weight is read at once."""
    spans = [(chunk.row, chunk.stop_row) for chunk in _choose_chunks(rows, cols)]
    return [(spans[0][0], spans[-1][1])] if 0 < rows * cols <= ELEMENTS else spans


def _choose_chunks(rows: int, cols: int) -> Iterable[Chunk]:
    """Yield a few chunks, spread over the rows."""
    step = max(-(-rows // PLACES), 1)
    n = max(min(ROWS, ELEMENTS // max(cols, 1)), 1)
    for row in range(0, rows, step):
        yield Chunk(row, min(row + n, rows), 0, cols if n > 1 else min(cols, ELEMENTS))
