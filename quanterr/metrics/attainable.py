"""How good a weight could be with its stored scales, and with good ones, from a sample. Nothing here needs torch."""

from math import inf, log10
from typing import Literal, NamedTuple

Kind = Literal["row", "column", "tile", "group", "underflow"]


class Part(NamedTuple):
    """Rows, columns or tiles (64 columns of a row) of the sample whose error is far above what their scales allow.

    Or groups of a scale that is far worse than a good one: there ``snr_db`` is that of the nearest codes,
    ``attainable_db`` that of good scales, and ``factor`` the stored scale / a good one. The kind underflow: good ones
    are too small to be stored.
    """

    kind: Kind
    number: int
    size: int  # elements of each
    places: tuple[tuple[int, int], ...]  # (row, column) where the worst of them begin, in order; -1: all
    worst: tuple[int, int]
    snr_db: float  # of the worst
    attainable_db: float
    factor: float  # y is that times x there, if that explains the error; else NaN
    louder_db: float = 0.0  # its mean square error / that of the sample, where that is of one element each
    apart: bool = False  # the factor is far from those of the other parts


class Attainable(NamedTuple):
    """Energies and counts of the sampled elements that are finite."""

    n: int
    x_sq: float  # Σx²
    e_sq: float  # Σe²
    best_sq: float  # Σe*², what is left with the nearest codes
    clipped_sq: float = 0.0  # the part of that of elements out of range
    clipped_x_sq: float = 0.0  # Σx² of these
    off: int = 0  # elements in range whose code is two or more steps from the nearest
    clipped: int = 0  # elements out of range
    parts: tuple[Part, ...] = ()
    rounding: float | None = None  # mean square of the errors in steps, where all codes are the nearest
    stored_sq: float | None = None  # Σe*² of the sampled groups of a scale, which may be others; None: there are none
    good_sq: float = 0.0  # the same with good scales in place of the stored ones
    scale_ratio: float = 1.0  # median of stored / good scale over these groups
    weighted_e_sq: float | None = None  # Σe² times the importance of the columns, where it is known
    weighted_best_sq: float = 0.0  # Σe*² times it
    beyond_sq: float = 0.0  # the part of Σe² of elements in range whose code is none of the two around them

    @property
    def snr_db(self) -> float:
        """Of the nearest codes."""
        return level(self.x_sq, self.best_sq)

    @property
    def excess_db(self) -> float:
        """By how much the stored codes are worse; 0 where they are the nearest."""
        return 0.0 if self.e_sq <= self.best_sq else level(self.e_sq, self.best_sq)

    @property
    def judged_excess_db(self) -> float:
        """The same, each element as important as its column where that is known."""
        if self.weighted_e_sq is None:
            return self.excess_db
        return 0.0 if self.weighted_e_sq <= self.weighted_best_sq else level(self.weighted_e_sq, self.weighted_best_sq)

    @property
    def scale_loss_db(self) -> float | None:
        """By how much good scales would be better than the stored ones; None where that is not known."""
        if self.stored_sq is None:
            return None
        return 0.0 if self.stored_sq <= self.good_sq else level(self.stored_sq, self.good_sq)

    @property
    def format_snr_db(self) -> float | None:
        """Of the nearest codes with good scales."""
        loss = self.scale_loss_db
        return None if loss is None else self.snr_db + loss

    @property
    def avoidable_db(self) -> float:
        """What scales and codes lose together."""
        return self.excess_db + (self.scale_loss_db or 0.0)

    @property
    def clipping_db(self) -> float:
        """What the nearest codes lose by clipping."""
        return level(self.best_sq, self.rounding_sq)

    @property
    def rounding_sq(self) -> float:
        """Σe*² of the elements in range."""
        return max(self.best_sq - self.clipped_sq, 0.0)


def level(signal: float, noise: float) -> float:
    """10·log10(signal / noise); infinite without noise, 0 without either."""
    if not noise:
        return inf if signal else 0.0
    return 10 * (log10(signal) - log10(noise)) if signal else -inf
