"""What the sums of a weight give of its error: how much of it one factor would take away."""

from functools import cache
from math import inf, isfinite, log10, sqrt
from typing import NamedTuple

from quanterr.formats import rows_of
from quanterr.metrics.sums import Sums, as_float, ratio
from quanterr.pairing.model import Pair

LEVELS = {1: 0.0, 2: 4.0, 3: 10.0, 4: 16.0, 5: 22.0, 6: 27.0}  # dB that right weights of this many bits reach
LEVEL = 29.0  # dB, of more bits
GAINS = {1: inf, 2: 2.5}  # dB that a factor may bring right weights of so few bits
GAIN = 0.9  # dB, of more bits: 0.04 dB at 20 dB by theory, where nothing is clipped
EXACT_DB = 400.0  # stands for no error at all
CAST = 0.005  # a factor that is nearer to 1 is none
UNIFORM = 32.0  # dB that codes of 8 bits with equal steps reach without outliers
OUTLIERS = 4.0  # dB that they often cost
NARROW = 4  # dB: where the usual level of a format is known so well, it says something about a weight


class Figures(NamedTuple):
    """Of one weight whose sides differ; ``factor`` is that of y = factor · x, ``snr_db`` finite."""

    bits: int
    snr_db: float
    cosine: float
    factor: float
    rescaled_db: float  # SNR once y is divided by that factor

    usual_db: float  # what its format and bits usually reach at least

    @property
    def gains(self) -> bool:
        """Whether one factor takes away more of the error than rounding explains.

        Noise alone makes y longer than x, and any smaller y nearer: the factor of x = y / factor may then be any
        between that of y on x and the inverse of that of x on y. Only one that is not 1 by either is one.
        """
        noise = self.factor > 1 > self.factor * self.cosine**2
        gain = self.rescaled_db - self.snr_db
        return gain > GAINS.get(self.bits, GAIN) and abs(self.factor - 1) > CAST and not noise

    @property
    def low(self) -> bool:
        """Whether the SNR is below what is usual; a reason to look closer, no finding."""
        return self.snr_db < self.usual_db


def bits_of(pair: Pair) -> int:
    """Of a code; where its format does not give, stored bits of an element."""
    return pair.quantized.code_bits or max(8 * pair.quantized.nbytes // max(pair.quantized.n, 1), 1)


def level_of(bits: int) -> float:
    """The SNR in dB that right weights of this many bits reach."""
    return LEVELS.get(bits, LEVEL)


def usual_of(format_name: str) -> tuple[int, int] | None:
    """The usual SNR in dB of a format, from … to …, where it hardly depends on the weight."""
    rows = rows_of(format_name)
    usual = rows[0].usual_db if len(rows) == 1 else None
    return usual if usual and usual[1] - usual[0] <= NARROW else None


@cache  # one object for many weights
def _usual_at_least(format_name: str, bits: int, uniform_bits: int | None) -> float:
    usual = usual_of(format_name)
    if usual:
        return usual[0] - OUTLIERS
    return UNIFORM if uniform_bits == bits == 8 else level_of(bits)


def norm_ratio(sums: Sums) -> float:
    """||y|| / ||x||; infinite where it is too large for a float64."""
    return sqrt(ratio(sums.y_sq, sums.x_sq))


def db(signal: int, noise: int) -> float:
    """An SNR in dB from energies in any unit, neither of them zero, however large."""
    return 10 * (log10(signal) - log10(noise))


def figures_of(pair: Pair, sums: Sums) -> Figures | None:
    """The figures, from exact sums; None where one side is zero or a sum too large for a float64."""
    if not sums.x_sq or not sums.y_sq or not sums.e_sq or not isfinite(as_float(max(sums.x_sq, sums.y_sq, sums.e_sq))):
        return None
    bits, both = bits_of(pair), sums.x_sq * sums.y_sq
    unexplained = both - sums.xy * sums.xy
    return Figures(
        bits=bits,
        snr_db=db(sums.x_sq, sums.e_sq),
        cosine=_root(sums.xy * sums.xy / both, sums.xy),
        factor=_quotient(sums.y_sq, sums.xy),
        rescaled_db=db(both, unexplained) if unexplained > 0 else EXACT_DB,
        usual_db=_usual_at_least(pair.quantized.format, bits, pair.quantized.uniform_bits),
    )


def _quotient(a: int, b: int) -> float:
    try:
        return a / b if b else 0.0
    except OverflowError:
        return 0.0


def _root(square: float, sign: int) -> float:
    return -sqrt(square) if sign < 0 else sqrt(square)
