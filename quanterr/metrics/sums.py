"""Mergeable sums over the elements of a weight, from which all metrics are computed after one pass.

Every sum is an integer, as each float64 is a whole multiple of 2^-1074. So sums of float64 are exact, and as adding
integers is associative and commutative, the order of chunks, the number of threads and the grouping of layers change
no digit. Only :func:`as_float` rounds, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quanterr.metrics.histogram import Histogram
    from quanterr.metrics.peaks import Peaks

FRACTION_BITS = 1074  # the smallest positive float64 is 2^-1074
ONE = 1 << FRACTION_BITS
INFINITE_SUM = 1 << FRACTION_BITS + 1100  # stands for a sum that float64 cannot hold
LOW_BITS = 128  # low bits of a sum, which are zero unless it has terms below 2^-890
LOW, UNIT = (1 << LOW_BITS) - 1, 2.0 ** (LOW_BITS - FRACTION_BITS)
KEPT_ROWS = 5


def exact(value: float) -> int:
    """Convert a float64 that is not NaN to units of 2^-1074; infinities become ±TOO_LARGE."""
    if not isfinite(value):
        return INFINITE_SUM if value > 0 else -INFINITE_SUM
    numerator, denominator = value.as_integer_ratio()
    return numerator << FRACTION_BITS - denominator.bit_length() + 1


def as_float(total: int) -> float:
    """Convert a sum in units of 2^-1074 to the nearest float64; infinity if it is too large."""
    if total.bit_length() < 1024 + LOW_BITS and not total & LOW:  # the usual case, which takes half the time
        return (total >> LOW_BITS) * UNIT
    try:
        return total / ONE
    except OverflowError:
        return inf if total > 0 else -inf


def ratio(numerator: float, denominator: float) -> float:
    """Return numerator / denominator; 0/0 is NaN, and any other number over 0 is infinity with the numerator's sign."""
    if denominator:
        try:
            return numerator / denominator
        except OverflowError:
            return inf if (numerator > 0) == (denominator > 0) else -inf
    return nan if not numerator else inf if numerator > 0 else -inf


class RowSums(NamedTuple):
    """Energies of a row, a piece of a row, or several rows, in units of 2^-1074, and the largest |e|."""

    x_sq: int
    e_sq: int
    e_max: float
    whole: bool  # whether it is exactly one whole row
    zeroed: bool = False  # whether y is zero everywhere

    @property
    def dead(self) -> bool:
        """True if y is zero everywhere but x is not."""
        return self.zeroed and self.x_sq > 0

    @classmethod
    def from_energies(cls, x_sq: float, e_sq: float, e_max: float, whole: bool, zeroed: bool = False) -> RowSums:
        """Return the sums of a row from its energies as float64."""
        return cls(exact(x_sq), exact(e_sq), e_max, whole, zeroed)

    def join(self, other: RowSums) -> RowSums:
        """Merge two pieces of a row."""
        energies, e_max = (self.x_sq + other.x_sq, self.e_sq + other.e_sq), max(self.e_max, other.e_max)
        return RowSums(*energies, e_max, False, self.zeroed and other.zeroed)


class WorstPlace(NamedTuple):
    """The location of a weight's largest |e|: the element, if its ``values`` x and y are known, or the row.

    Without values, ``col`` is the first column of the piece of the row. Of equally bad rows, it is the first.
    """

    error: float
    row: int
    col: int
    values: tuple[float, float] | None = None

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key: the largest error first, then the first row."""
        return -self.error, self.row, self.col


@dataclass(slots=True)
class Sums:
    """Sums over x (original), y (quantized) and e = y - x, for the elements where both are finite."""

    # counts
    elements: int = 0  # all elements, finite or not
    n: int = 0  # elements that are finite on both sides
    nonfinite_original: int = 0
    nonfinite_quantized: int = 0
    x_nonzero: int = 0
    zero_reference: int = 0  # x = 0, y ≠ 0
    zeroed: int = 0  # x ≠ 0, y = 0
    outliers: int = 0  # |e| > threshold
    relative_outliers: int = 0  # |e| > 1 % of |x|
    saturated: int = 0
    dead_rows: int = 0  # whole rows that are zero in y but not in x
    # sums, in units of 2^-1074
    x: int = 0
    y: int = 0
    e: int = 0
    x_abs: int = 0
    e_abs: int = 0
    x_sq: int = 0
    y_sq: int = 0
    e_sq: int = 0
    xy: int = 0
    relative: int = 0  # |e| / |x| over x ≠ 0
    weighted_x_sq: int = 0  # Σ importance · x²; 0 without an importance matrix
    weighted_e_sq: int = 0
    # extremes
    e_max: float = 0.0
    e_min: float = inf
    relative_max: float = 0.0
    x_max: float = 0.0
    cast_max: float = 0.0  # largest |e| / max(|x|, least normal number of the cast's dtype), if requested
    # Fields of one weight, meaningless for several merged weights.
    worst: WorstPlace | None = None
    rows: dict[int, RowSums] = field(default_factory=dict)
    matrices: dict[int, RowSums] = field(default_factory=dict)  # sums of each matrix in a stack
    histogram: Histogram | None = field(default=None, repr=False)  # of |e|
    peaks: list[Peaks] = field(default_factory=list, repr=False, compare=False)  # dropped once the weight is finished
    sampled: bytes = field(default=b"", init=False, repr=False, compare=False)  # stored bytes, for a fingerprint
    _worst_rows: list[tuple[int, RowSums]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def nonfinite(self) -> bool:
        """True if any element of either side is NaN or infinite."""
        return bool(self.nonfinite_original or self.nonfinite_quantized)

    @property
    def exact(self) -> bool:
        """True if both sides are equal, element by element, and finite."""
        return not self.e_max and not self.nonfinite

    @property
    def worst_rows(self) -> list[tuple[int, RowSums]]:
        """The few rows with the lowest SNR, the worst first; cached, as several findings use them."""
        if self._worst_rows is None:
            self._worst_rows = worst_rows(self.rows.items())
        return self._worst_rows

    def keep_rows(self, first: int, rows: Iterable[tuple[int, float, float, float, int]], whole: bool) -> None:
        """Set the rows, of which there are none yet: number from ``first``, Σx², Σe², max |e|, whether y is zero."""
        for row, x_sq, e_sq, e_max, zeroed in rows:
            self.rows[first + row] = RowSums.from_energies(x_sq, e_sq, e_max, whole, bool(zeroed))

    def list_rows_above(self, min_ratio: float) -> list[int]:
        """Return the numbers of the worst rows whose Σe² is at least ``min_ratio`` · Σx²."""
        return [number for number, row in self.worst_rows if as_float(row.e_sq) >= min_ratio * as_float(row.x_sq)]

    def add(self, other: Sums) -> None:
        """Merge the sums of another part of the same weight."""
        self._worst_rows = None
        self.merge_other_weight(other)
        if other.worst and (self.worst is None or other.worst.order < self.worst.order):
            self.worst = other.worst
        for number, row in other.rows.items():
            self.rows[number] = self.rows[number].join(row) if number in self.rows else row
        if (
            other.rows and len(self.rows) > 4 * KEPT_ROWS
        ):  # pieces of rows are all kept, as their other pieces are still missing
            kept = [item for item in self.rows.items() if not item[1].whole]
            self.rows = dict(kept + worst_rows(item for item in self.rows.items() if item[1].whole))
        for number, sums in other.matrices.items():
            self.matrices[number] = self.matrices[number].join(sums) if number in self.matrices else sums
        self.peaks += other.peaks
        if other.histogram:
            self.histogram = self.histogram + other.histogram if self.histogram else other.histogram

    def merge_other_weight(self, other: Sums) -> None:
        """Merge the sums that several weights can share, unlike rows; histograms are merged separately."""
        for name in ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.e_max = max(self.e_max, other.e_max)
        self.e_min = min(self.e_min, other.e_min)
        self.x_max = max(self.x_max, other.x_max)
        self.cast_max = max(self.cast_max, other.cast_max)
        self.relative_max = max(self.relative_max, other.relative_max)

    @classmethod
    def merge(cls, many: Iterable[Sums]) -> Sums:
        """Merge many sums of parts of one weight; return empty sums if there are none."""
        total = cls()
        for sums in many:
            total.add(sums)
        return total


ADDED = tuple(name for name, annotation in Sums.__annotations__.items() if annotation == "int")


def worst_rows(rows: Iterable[tuple[int, RowSums]]) -> list[tuple[int, RowSums]]:
    """Return the :data:`KEPT_ROWS` rows with the lowest SNR, the worst first, leaving out rows without an error."""
    return sorted((item for item in rows if item[1].e_sq), key=_row_order)[:KEPT_ROWS]


def _row_order(item: tuple[int, RowSums]) -> tuple[float, int]:
    number, row = item
    return -ratio(row.e_sq, row.x_sq), number
