"""Figures about a weight's error, computed from its exact sums, such as how much of the error one factor removes."""

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

MAX_EXPECTED_DB = 29.0  # maximum SNR that is expected however many bits there are: 8-bit floats do not reach much more
MAX_OUTLIER_LOSS_DB = (
    4.0  # a usual loss to outliers; a format's usual range judges single weights only if it is narrower
)
BF16_ERROR = 2.0**-8  # relative error of a cast to BF16
EXACT_DB = 400.0  # the SNR that stands for no error


class Figures(Struct, frozen=True, gc=False):
    """Figures about one weight whose sides differ.

    ``factor`` is the f in y = f · x; ``snr_db`` is finite.
    """

    bits: int
    snr_db: float
    cosine: float
    factor: float
    rescaled_db: float  # SNR after y is divided by ``factor``

    usual_db: float  # minimum SNR that correct weights of this format and number of bits usually have
    peak: float = 0.0  # share of the energy of x that its largest element holds

    @property
    def is_peaked(self) -> bool:
        """True if the largest element holds so much of the energy of x that the other figures describe it alone."""
        return self.peak > 1 / MIN_PEERS

    @property
    def is_of_few(self) -> bool:
        """True if MIN_VALUES elements or fewer may hold the energy of x: rounding so few may look like a factor."""
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
        return gain > find_max_gain(self.bits) and abs(self.factor - 1) > BF16_ERROR and not noise

    @property
    def is_scaled(self) -> bool:
        """True if y is longer or shorter than x by more than rounding explains, even if this adds little error.

        After rounding, the regression of y on x and the inverse of the regression of x on y are on both sides of 1, or
        one of them is 1.
        """
        along_x = self.factor * self.cosine**2  # regression of y on x; ``factor`` is the inverse of that of x on y
        return self.factor > 0 and (along_x > 1 + BF16_ERROR or self.factor < 1 - BF16_ERROR)

    @property
    def doubt(self) -> float:
        """Relative error of ``factor``: the true one is between the regressions of y on x and of x on y."""
        return 1 - self.cosine**2 + FLOAT32_TOLERANCE

    @property
    def low(self) -> bool:
        """True if the SNR is below the usual level, which is a reason to read the weight again, but no finding."""
        return self.snr_db < self.usual_db


def find_bits(pair: Pair) -> int:
    """Return the bits of a code of the quantized weight."""
    return find_bits_of_weight(pair.quantized)


def find_bits_of_weight(weight: Weight) -> int:
    """Return the bits of a code; if the format does not define them, the stored bits per element."""
    return weight.code_bits or max(8 * weight.nbytes // max(weight.n, 1), 1)


def find_min_level(bits: int) -> float:
    """Return the SNR in dB that correct weights of this many bits reach."""
    return min(BIT_DB * bits - MAX_METHOD_LOSS_DB, MAX_EXPECTED_DB)


def find_max_gain(bits: int) -> float:
    """Return the dB that one factor may gain on a correct weight: in theory 0.04 at 20 dB, without clipping."""
    return {1: inf, 2: DOUBLE_DB}.get(bits, SMALL_DB)


def find_usual_range(format_name: str) -> tuple[int, int] | None:
    """Return the range of SNRs in dB that is usual for a format; None if it depends much on the weight."""
    rows = find_rows(format_name)
    usual = rows[0].usual_db if len(rows) == 1 else None
    return usual if usual and usual[1] - usual[0] <= MAX_OUTLIER_LOSS_DB else None


@cache  # many weights refer to one object
def _find_usual_min(format_name: str, bits: int) -> float:
    usual = find_usual_range(format_name)
    if usual:
        return usual[0] - MAX_OUTLIER_LOSS_DB
    return find_min_level(bits)


def compute_norm_ratio(sums: Sums) -> float:
    """Return ||y|| / ||x||; infinite if too large for a float64."""
    return sqrt(ratio(sums.y_sq, sums.x_sq))


def compute_ratio_db(signal: int, noise: int) -> float:
    """Return the ratio of two energies in dB; both are positive integers of any size, in the same unit."""
    return 10 * (log10(signal) - log10(noise))


def compute_figures(pair: Pair, sums: Sums) -> Figures | None:
    """Return the figures of a weight; None if one side or the error is zero, or a sum is too large for a float64."""
    if not sums.x_sq or not sums.y_sq or not sums.e_sq or not isfinite(as_float(max(sums.x_sq, sums.y_sq, sums.e_sq))):
        return None
    bits, both = find_bits(pair), sums.x_sq * sums.y_sq
    unexplained = both - sums.xy * sums.xy
    return Figures(
        bits=bits,
        snr_db=compute_ratio_db(sums.x_sq, sums.e_sq),
        cosine=_compute_signed_root(sums.xy * sums.xy / both, sums.xy),
        factor=_divide(sums.y_sq, sums.xy),
        rescaled_db=compute_ratio_db(both, unexplained) if unexplained > 0 else EXACT_DB,
        usual_db=_find_usual_min(pair.quantized.format, bits),
        peak=sums.x_max**2 / as_float(sums.x_sq),
    )


def _divide(a: int, b: int) -> float:
    """Return a / b; 0 if undefined or too large."""
    try:
        return a / b if b else 0.0
    except OverflowError:
        return 0.0


def _compute_signed_root(square: float, sign: int) -> float:
    """Return the square root with the sign of ``sign``."""
    return -sqrt(square) if sign < 0 else sqrt(square)
