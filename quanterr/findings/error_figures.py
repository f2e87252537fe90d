"""Figures about a weight's error, from its exact sums: above all how much of the error one factor removes."""

from functools import cache
from math import inf, isfinite, log10, sqrt

from msgspec import Struct

from quanterr.findings.limits import (
    BIT_DB,
    DOUBLE_DB,
    FLOAT32_TOLERANCE,
    MAX_METHOD_LOSS_DB,
    MIN_PEERS,
    MIN_VALUES,
    SMALL_DB,
)
from quanterr.formats import Weight, find_rows
from quanterr.metrics.sums import Sums, as_float, ratio
from quanterr.pairing.model import Pair

MOST_DB = 29.0  # SNR that any correct weight reaches if bits suffice: floats of 8 bits do
OUTLIERS_DB = 4.0  # a usual loss to outliers; ranges of usual levels apply to single weights only if they are narrower
CAST_BF16 = 2.0**-8  # relative error of a cast to BF16
EXACT_DB = 400.0  # stands for no error at all


class Figures(Struct, frozen=True, gc=False):
    """Figures about one weight whose sides differ.

    ``factor`` is the f in y = f · x; ``snr_db`` is finite.
    """

    bits: int
    snr_db: float
    cosine: float
    factor: float
    rescaled_db: float  # SNR after y is divided by ``factor``

    usual_db: float  # least SNR that the format and its bits usually reach
    peak: float = 0.0  # share of the energy of x that its largest element holds

    @property
    def is_peaked(self) -> bool:
        """True if the largest element holds so much of the energy of x that other numbers are about it alone."""
        return self.peak > 1 / MIN_PEERS

    @property
    def is_of_few(self) -> bool:
        """True if about ENOUGH elements, or fewer, may hold all the energy of x: rounding these has a factor, too."""
        return self.peak > 1 / MIN_VALUES

    @property
    def gains(self) -> bool:
        """True if one factor removes more of the error than rounding explains.

        Noise alone makes y longer than x, so that a smaller y is always nearer. The factor of x = y / factor may then
        be anything between the regression of y on x and the inverse of the regression of x on y. It counts only if
        both are on the same side of 1.
        """
        noise = self.factor > 1 > self.factor * self.cosine**2
        gain = self.rescaled_db - self.snr_db
        return gain > gain_of(self.bits) and abs(self.factor - 1) > CAST_BF16 and not noise

    @property
    def is_scaled(self) -> bool:
        """True if y is longer or shorter than x by more than rounding explains, however little error that makes.

        Rounding leaves y as long as x along x, or x as long as y along y, or anything between: the two regressions of
        the one on the other are then on both sides of 1.
        """
        along_x = self.factor * self.cosine**2  # at most ``factor``, which is that along y
        return self.factor > 0 and (along_x > 1 + CAST_BF16 or self.factor < 1 - CAST_BF16)

    @property
    def doubt(self) -> float:
        """Relative error of ``factor``: the true one is between the regressions of y on x and of x on y."""
        return 1 - self.cosine**2 + FLOAT32_TOLERANCE

    @property
    def low(self) -> bool:
        """True if the SNR is below the usual level: a reason to look closer, not a finding."""
        return self.snr_db < self.usual_db


def bits_of(pair: Pair) -> int:
    """Return the bits of a code of the quantized weight."""
    return bits_of_weight(pair.quantized)


def bits_of_weight(weight: Weight) -> int:
    """Return the bits of a code; if the format does not define them, the stored bits per element."""
    return weight.code_bits or max(8 * weight.nbytes // max(weight.n, 1), 1)


def level_of(bits: int) -> float:
    """Return the SNR in dB that correct weights of this many bits reach."""
    return min(BIT_DB * bits - MAX_METHOD_LOSS_DB, MOST_DB)


def gain_of(bits: int) -> float:
    """Return the dB that one factor may gain on a correct weight: in theory 0.04 at 20 dB, without clipping."""
    return {1: inf, 2: DOUBLE_DB}.get(bits, SMALL_DB)


def usual_of(format_name: str) -> tuple[int, int] | None:
    """Return the range of SNRs in dB that is usual for a format; None if it depends much on the weight."""
    rows = find_rows(format_name)
    usual = rows[0].usual_db if len(rows) == 1 else None
    return usual if usual and usual[1] - usual[0] <= OUTLIERS_DB else None


@cache  # one object for many weights
def _usual_at_least(format_name: str, bits: int) -> float:
    usual = usual_of(format_name)
    if usual:
        return usual[0] - OUTLIERS_DB
    return level_of(bits)


def norm_ratio(sums: Sums) -> float:
    """Return ||y|| / ||x||; infinite if too large for a float64."""
    return sqrt(ratio(sums.y_sq, sums.x_sq))


def ratio_db(signal: int, noise: int) -> float:
    """Return the ratio of two energies in dB; both are positive integers of any size, in the same unit."""
    return 10 * (log10(signal) - log10(noise))


def compute_figures(pair: Pair, sums: Sums) -> Figures | None:
    """Return the figures of a weight; None if one side or the error is zero, or a sum is too large for a float64."""
    if not sums.x_sq or not sums.y_sq or not sums.e_sq or not isfinite(as_float(max(sums.x_sq, sums.y_sq, sums.e_sq))):
        return None
    bits, both = bits_of(pair), sums.x_sq * sums.y_sq
    unexplained = both - sums.xy * sums.xy
    return Figures(
        bits=bits,
        snr_db=ratio_db(sums.x_sq, sums.e_sq),
        cosine=_signed_root(sums.xy * sums.xy / both, sums.xy),
        factor=_divide(sums.y_sq, sums.xy),
        rescaled_db=ratio_db(both, unexplained) if unexplained > 0 else EXACT_DB,
        usual_db=_usual_at_least(pair.quantized.format, bits),
        peak=sums.x_max**2 / as_float(sums.x_sq),
    )


def _divide(a: int, b: int) -> float:
    """Return a / b; 0 if undefined or too large."""
    try:
        return a / b if b else 0.0
    except OverflowError:
        return 0.0


def _signed_root(square: float, sign: int) -> float:
    """Return the square root with the sign of ``sign``."""
    return -sqrt(square) if sign < 0 else sqrt(square)
