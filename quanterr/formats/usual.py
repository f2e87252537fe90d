"""The SNR that is usual for the weights of a format."""

from collections.abc import Iterable
from math import log, log10
from statistics import NormalDist

from quanterr.formats.base import Format, Weight

WIDE_DB = 10  # a format that declares a wider range has codes of several sizes
LARGEST_GROUP = 256  # maximum group for an estimate: in larger groups, outliers decide the SNR
# dB by which real weights are below, or above, normally distributed ones: measured with all-MiniLM-L6-v2,
# SmolLM2-135M and models of the tests.
BELOW_DB, BELOW_OF_ROWS_DB, ABOVE_DB = 3, 9, 2


def estimate_usual_snr(row: Format, weights: Iterable[Weight]) -> tuple[int, int] | None:
    """Return the range of SNRs in dB that is usual for these weights of a format, or None if it is unknown.

    Where a format stores integers of several sizes, the range follows from their bits b and groups. The largest of g
    normal values is q = Φ⁻¹(1 - ln 2 / 2g) at the median, and a step s costs s²/12: symmetric codes have
    12·(2^(b-1) - 1)² / q², codes with a zero point 12·((2^b - 1) / 2)² / q². If a whole
    tensor has one scale, outliers decide the SNR, and the range that the format declares applies.
    """
    if row.usual_db is None or row.usual_db[1] - row.usual_db[0] <= WIDE_DB:
        return row.usual_db
    kinds = {(weight.uniform_bits, _find_group(weight)) for weight in weights}
    ranges = [_find_range(bits, group) for bits, group in kinds if bits is not None and bits > 1 and group is not None]
    if len(ranges) < len(kinds) or not kinds:
        return row.usual_db
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _find_group(weight: Weight) -> int | None:
    """Return how many elements share a scale, without blocks those of a row; None if all do."""
    if weight.block_size is not None:
        rows, cols = weight.block_size
        return None if (rows, cols) == weight.matrix and rows > 1 else rows * cols
    return None if weight.scale is None or weight.scale.n == 1 else weight.matrix[1]


def _find_range(bits: int, group: int) -> tuple[int, int]:
    peak = NormalDist().inv_cdf(1 - log(2) / (2 * max(group, 2)))
    symmetric, asymmetric = (
        20 * log10(steps / peak) + 10 * log10(12) for steps in (2 ** (bits - 1) - 1, 2**bits / 2 - 0.5)
    )
    below = BELOW_DB if group <= LARGEST_GROUP else BELOW_OF_ROWS_DB
    return round(symmetric) - below, round(asymmetric) + ABOVE_DB
