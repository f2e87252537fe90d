"""The minimum error of a weight with its stored scales, and with good ones, from a sample. Needs no torch."""

from __future__ import annotations

from functools import cached_property
from math import inf, log10
from typing import Literal, NamedTuple

from msgspec import Struct

from quanterr.metrics.sums import Sums, as_float, exact, ratio

NEIGHBOUR_ROWS = 8  # maximum distance in rows of neighbouring tiles, which have the same columns
Kind = Literal["row", "column", "tile", "group", "underflow"]


class BadRegion(NamedTuple):
    """Regions of one kind in the sample whose error is far larger than their scales allow.

    A region is a row, a column or a tile (64 columns of a row), or a group with a scale that is far worse than a good
    one. For groups, ``snr_db`` is the SNR of the nearest codes, ``attainable_db`` the SNR with good scales, and
    ``factor`` the stored scale / a good one. Kind ``underflow``: a good scale is too small to be stored.
    """

    kind: Kind
    number: int  # number of such regions
    size: int  # elements of each region
    places: tuple[tuple[int, int], ...]  # (row, column) of the first element of the worst regions, sorted; -1: all
    worst: tuple[int, int]  # (row, column) of the worst region
    snr_db: float  # SNR of the worst region
    attainable_db: float
    factor: float  # y = factor · x in the worst region, if that explains the error; else NaN
    louder_db: float = 0.0  # mean square error of the worst region / mean square error of the sample
    apart: bool = False  # whether the factor is far from the factors of the other regions

    @property
    def is_scattered(self) -> bool:
        """True if at most half of the regions have a neighbour in their row, or for tiles also in their columns."""
        places, width = set(self.places), 1 if self.kind == "column" else self.size
        steps = [(0, width), *((down, 0) for down in range(1, NEIGHBOUR_ROWS + 1) if self.kind == "tile")]
        near = [(sign * down, sign * across) for down, across in steps for sign in (1, -1)]
        beside = sum(any((row + down, col + across) in places for down, across in near) for row, col in places)
        return self.worst[1] >= 0 and 2 * beside <= len(places)


class Attainable(Struct, frozen=True, dict=True):  # dict: for its cached numbers
    """Energies and counts over the finite elements of a sample."""

    n: int
    x_sq: float  # Σx²
    e_sq: float  # Σe²
    best_sq: float  # Σe*², the error of the nearest codes
    clipped_sq: float = 0.0  # Σe*² of elements out of range
    clipped_x_sq: float = 0.0  # Σx² of elements out of range
    off: int = 0  # elements in range whose code is two or more steps from the nearest
    clipped: int = 0  # elements out of range
    parts: tuple[BadRegion, ...] = ()
    rounding: float | None = None  # mean square error in steps; set only if all codes are the nearest
    # Σe*² over sampled groups, which may be in other rows; None if no groups were sampled.
    stored_sq: float | None = None
    good_sq: float = 0.0  # Σe*² over the same groups with good scales
    scale_ratio: float = 1.0  # median of stored / good scale over the same groups
    weighted_e_sq: float | None = None  # Σ importance · e²; None without an importance matrix
    weighted_best_sq: float = 0.0  # Σ importance · e*²
    beyond_sq: float = 0.0  # Σe² of elements in range whose code is neither of the two nearest
    unlike_columns: tuple[int, ...] = ()  # columns that may hold values of other columns

    @cached_property
    def snr_db(self) -> float:
        """SNR of the nearest codes."""
        return level(self.x_sq, self.best_sq)

    def min_nmse(self, sums: Sums) -> float:
        """Return Σe² / Σx² of the sample, or of the whole weight with these sums, whichever is smaller."""
        return min(ratio(as_float(sums.e_sq), as_float(sums.x_sq)), ratio(self.e_sq, self.x_sq))

    def represents(self, sums: Sums, within_db: float) -> bool:
        """Return whether the SNR of the whole weight, with these sums, exceeds that of its sample - ``within_db``."""
        whole_db = level(as_float(sums.x_sq), as_float(sums.e_sq))
        return self.n == sums.n or whole_db > level(self.x_sq, self.e_sq) - within_db

    @cached_property
    def excess_db(self) -> float:
        """Loss of the stored codes against the nearest ones, in dB; 0 if they are the nearest."""
        return 0.0 if self.e_sq <= self.best_sq else level(self.e_sq, self.best_sq)

    @cached_property
    def weighted_excess_db(self) -> float:
        """Like ``excess_db``, but weighted by the importance of columns if it is known."""
        if self.weighted_e_sq is None:
            return self.excess_db
        return 0.0 if self.weighted_e_sq <= self.weighted_best_sq else level(self.weighted_e_sq, self.weighted_best_sq)

    @cached_property
    def scale_loss_db(self) -> float | None:
        """Loss of the stored scales against good ones, in dB; None if unknown."""
        if self.stored_sq is None:
            return None
        return 0.0 if self.stored_sq <= self.good_sq else level(self.stored_sq, self.good_sq)

    @property
    def format_snr_db(self) -> float | None:
        """SNR of the nearest codes with good scales; None if unknown."""
        loss = self.scale_loss_db
        return None if loss is None else self.snr_db + loss

    @property
    def avoidable_db(self) -> float:
        """Loss of scales and codes together, in dB."""
        return self.excess_db + (self.scale_loss_db or 0.0)

    @property
    def clipping_db(self) -> float:
        """Loss from clipping, in dB, of the stored codes, or of the nearest ones if these have more error."""
        error_sq = max(self.e_sq, self.best_sq)
        return level(error_sq, max(error_sq - self.clipped_sq, 0.0))

    @property
    def rounding_sq(self) -> float:
        """Σe*² of the elements in range."""
        return max(self.best_sq - self.clipped_sq, 0.0)


class PooledSamples:
    """Exact sums over layers with a known attainable SNR, in units of 2^-1074, for the error of all together."""

    __slots__ = ("_best_sq", "_e_sq", "_good_sq", "_x_sq")

    def __init__(self) -> None:
        """Start without layers."""
        self._x_sq = self._e_sq = self._best_sq = self._good_sq = 0  # Σx², Σe², Σe*² with stored and with good scales

    def add(self, sums: Sums, sample: Attainable | None) -> None:
        """Add a layer; ``sample`` shows how much of its error remains with the nearest codes and good scales."""
        if sample is None or not sample.e_sq or sums.nonfinite:
            return
        self._x_sq += sums.x_sq
        self._e_sq += sums.e_sq
        plain = sample.best_sq == sample.e_sq
        best_sq = sums.e_sq if plain else exact(as_float(sums.e_sq) / sample.e_sq * sample.best_sq)
        self._best_sq += best_sq
        loss = sample.scale_loss_db
        self._good_sq += exact(as_float(best_sq) / 10 ** (loss / 10)) if loss else best_sq

    def merge(self, other: PooledSamples) -> None:
        """Add the layers of another pool."""
        self._x_sq += other._x_sq
        self._e_sq += other._e_sq
        self._best_sq += other._best_sq
        self._good_sq += other._good_sq

    def whole(self) -> Attainable | None:
        """Return the minimum error of all layers together; None if it is not known for any layer."""
        if not self._x_sq:
            return None
        x_sq, e_sq, best_sq, good_sq = map(as_float, (self._x_sq, self._e_sq, self._best_sq, self._good_sq))
        return Attainable(0, x_sq, e_sq, best_sq, stored_sq=best_sq, good_sq=good_sq)


def level(signal: float, noise: float) -> float:
    """Return 10·log10(signal / noise); infinity without noise, minus infinity without signal, 0 without both."""
    if not noise:
        return inf if signal else 0.0
    return 10 * (log10(signal) - log10(noise)) if signal else -inf
