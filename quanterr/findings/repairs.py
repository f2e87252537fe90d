"""The table of possible repairs of a weight, and the search for the simplest that works.

A repair takes a sample of both sides and returns the SNR after the repair. It fits its numbers to one half of the
elements (every other row or column) and measures the SNR on the other half, because numbers that are fitted to all
elements, such as a factor per block, reduce the error of any weight.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, isfinite, isqrt, log10
from typing import NamedTuple

from quanterr.findings.error_figures import EXACT_DB, find_max_gain, find_min_level
from quanterr.findings.factors import SCALE_POWERS
from quanterr.findings.limits import (
    AGREEING_SHARE,
    ALIGNED_COSINE,
    DOUBLE_DB,
    FACTOR_TOLERANCE,
    MAX_METHOD_LOSS_DB,
    MIN_VALUES,
    SAME_VECTOR_COSINE,
    SEARCHED_DB,
    SLIGHT_DB,
)
from quanterr.findings.methods import ROUNDING
from quanterr.lazy_torch import Tensor, torch

MIN_TRANSPOSED_ROWS = 4  # fewer rows may resemble their transpose by chance
MAX_MATCHED_ROWS = 64  # maximum number of rows or columns to match
# dB that a repair with more than one number must gain: factors of blocks alone gain 3.5 on codes as coarse as E5M2.
MIN_GAIN_DB = ROUNDING.max_loss_db
BLOCK_SIZES = (16, 32, 64, 128)
MAX_NIBBLE_RUN = 64  # maximum number of rows or columns that a layout splits into low and high nibbles


class Sample(NamedTuple):
    """The first rows of both sides, float64, (r, c); elements that are not finite on one side are zero."""

    x: Tensor
    y: Tensor
    unit: Tensor | None = None  # factors of the codes; None if they are unknown


class Correction(NamedTuple):
    """The result of a repair on a sample."""

    snr_db: float
    gained_db: float  # gain over the SNR of the same elements before the repair
    description: str  # the fitted numbers, in words
    factors: Tensor | None = None  # y divided by the original, per row or block, (r, 1 or blocks)


class Repair(NamedTuple):
    """One way to correct a weight."""

    code: str
    message: str  # follows "<weight>: "
    remedy: str
    mend: Callable[[Sample], Correction | None]


def find_simplest_repair(
    sample: Sample, bits: int, attainable_db: float = -inf, has_zero: bool = True
) -> tuple[Repair, Correction] | None:
    """Return the first of REPAIRS that is about as good as the best; None if none corrects the weight.

    Args:
        sample: rows of both sides.
        bits: bits per code.
        attainable_db: SNR that the stored scales allow, if known; a repair has to come close to it.
        has_zero: whether codes are counted from a zero point, which may be wrong.
    """
    good = []
    min_db = max(min(find_min_level(bits), MAX_METHOD_LOSS_DB), attainable_db - DOUBLE_DB)
    for repair in REPAIRS:
        if repair.code == "zero_points" and not has_zero:
            continue
        min_gain_db = find_max_gain(bits) if repair is ONE_FACTOR else MIN_GAIN_DB
        min_gain_db += SLIGHT_DB * (
            repair.code == "zero_points"
        )  # half a step costs 6.0, rounding to 16 bits up to 5.1
        corrected = repair.mend(sample)
        if corrected and corrected.snr_db >= min_db and corrected.gained_db > min_gain_db:
            good.append((repair, corrected))
            if corrected.snr_db > find_min_level(bits):
                break
    best = max((corrected.snr_db for _, corrected in good), default=inf)
    return next(((repair, corrected) for repair, corrected in good if corrected.snr_db >= best - SEARCHED_DB), None)


def split_halves(sample: Sample, axis: int) -> tuple[Sample, Sample]:
    """Split a sample into its even and odd rows (``axis`` 0) or columns (1); a single row is split by columns."""
    if axis == 0 and len(sample.x) > 1:
        return Sample(sample.x[::2], sample.y[::2]), Sample(sample.x[1::2], sample.y[1::2])
    return Sample(sample.x[..., ::2], sample.y[..., ::2]), Sample(sample.x[..., 1::2], sample.y[..., 1::2])


def measure_snr(x: Tensor, e: Tensor, fitted: int = 0) -> float:
    """Return the SNR in dB of error ``e``, corrected for ``fitted`` numbers that were fitted to the same elements."""
    degrees = e.numel() - fitted
    if degrees <= 0:
        return -inf
    signal, noise = float(x.square().sum()), float(e.square().sum()) * e.numel() / degrees
    if not signal or not isfinite(noise):
        return -inf
    return 10 * (log10(signal) - log10(noise)) if noise else EXACT_DB


# Factors and shifts, fitted to half of the sample.


def _fit_factors(x: Tensor, y: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the factors by which y must be multiplied along ``axes``; 0 where y is zero.

    A factor is 1 if noise alone explains it: noise in y makes the factor too small, and noise in x its inverse.
    Without this rule, a factor below 1 reduces the error of any row or column of noisy codes.
    """
    xx, xy, yy = (product.sum(axes, keepdim=True) for product in (x.square(), x * y, y.square()))
    return (xy / yy).masked_fill((xy < yy) & (xy > 0) & (xx > xy), 1.0).nan_to_num(0.0, 0.0, 0.0)


def _try_one_factor(sample: Sample) -> Correction | None:
    """Try one factor for all elements, if most rows agree on it."""
    fit, check = split_halves(sample, 0)
    factor, row_factors = _fit_factors(fit.x, fit.y, (0, 1)), _fit_factors(sample.x, sample.y, (1,))
    agreement = float(((row_factors - factor).abs() < (factor - 1).abs() / 2).double().mean())
    if not float(factor) or agreement < AGREEING_SHARE:
        return None
    return _measure_correction(check, check.y * factor, f"{1 / float(factor):.4g}")._replace(factors=1 / factor)


def _try_row_factors(sample: Sample) -> Correction | None:
    """Try one factor per row."""
    fit, check = split_halves(sample, 1)
    factors = _fit_factors(fit.x, fit.y, (1,))
    return _apply_factors(check, factors)


def _try_column_factors(sample: Sample) -> Correction | None:
    """Try one factor per column."""
    if len(sample.x) < 2:
        return None
    fit, check = split_halves(sample, 0)
    factors = _fit_factors(fit.x, fit.y, (0,))
    return _apply_factors(check, factors)


def _split_blocks(sample: Sample) -> Iterator[tuple[Sample, Sample]]:
    """Yield the halves of both sides as (r, blocks, n / 2), for each block size n that divides the columns."""
    for n in BLOCK_SIZES:
        if not sample.x.shape[1] % n:
            yield split_halves(Sample(*(side.reshape(side.shape[0], -1, n) for side in sample[:2])), 1)


def _try_block_factors(sample: Sample) -> Correction | None:
    """Try one factor per block of columns, and return the best block size."""
    corrections = []
    for fit, check in _split_blocks(sample):
        factors = _fit_factors(fit.x, fit.y, (2,))
        corrections.append(_apply_factors(check, factors))
    return max(corrections, key=lambda corrected: corrected.snr_db, default=None)


def _apply_factors(check: Sample, factors: Tensor) -> Correction:
    """Return the correction that results from multiplying the values of ``check`` by ``factors``."""
    used = 1 / factors[factors != 0]
    description = f"{float(used.min()):.3g} to {float(used.max()):.3g}" if used.numel() else "0"
    corrected = _measure_correction(check, check.y * factors, description)
    return corrected._replace(factors=1 / factors.squeeze(2) if factors.dim() == 3 else 1 / factors)


def _measure_correction(check: Sample, y: Tensor, description: str) -> Correction:
    """Measure a correction on elements that it was not fitted to; ``y`` are their corrected values."""
    after = measure_snr(check.x, y - check.x)
    return Correction(after, after - measure_snr(check.x, check.y - check.x), description)


def _try_row_shifts(sample: Sample) -> Correction | None:
    """Try one shift per row."""
    fit, check = split_halves(sample, 1)
    shifts = (fit.y - fit.x).mean(1, keepdim=True)
    return _measure_correction(check, check.y - shifts, _describe_shifts(shifts))


def _try_block_shifts(sample: Sample) -> Correction | None:
    """Try one shift per block of columns, and return the best block size."""
    corrections = []
    for fit, check in _split_blocks(sample):
        shifts = (fit.y - fit.x).mean(2, keepdim=True)
        corrections.append(_measure_correction(check, check.y - shifts, _describe_shifts(shifts)))
    return max(corrections, key=lambda corrected: corrected.snr_db, default=None)


def _describe_shifts(shifts: Tensor) -> str:
    """Describe shifts by their mean."""
    return f"{float(shifts.mean()):.3g} on average"


# Powers of the stored scales.


def _try_power(power: float, sample: Sample) -> Correction | None:
    """Divide the values by a power of the stored scales."""
    if sample.unit is None:
        return None
    return _measure_correction(sample, (sample.y * sample.unit.pow(-power)).nan_to_num(0.0, 0.0, 0.0), "")


# Orders of rows and columns.


def _try_transpose(sample: Sample) -> Correction | None:
    """Try the transpose of the largest square corner, also with scales that were not transposed."""
    n = min(sample.x.shape)
    if n < MIN_TRANSPOSED_ROWS:
        return None
    corner = Sample(sample.x[:n, :n], sample.y[:n, :n])
    tried = [_measure_correction(corner, corner.y.t(), "")]
    if sample.unit is not None:
        unit = sample.unit[:n, :n]
        codes = (corner.y / unit).nan_to_num(0.0, 0.0, 0.0)
        tried.append(_measure_correction(corner, codes.t() * unit, ", but its scales are not"))
    return max(tried, key=lambda corrected: corrected.snr_db)


def _try_row_order(sample: Sample) -> Correction | None:
    """Try another order of rows."""
    return _try_order(sample.x, sample.y)


def _try_column_order(sample: Sample) -> Correction | None:
    """Try another order of columns."""
    return _try_order(sample.x.t(), sample.y.t())


def _try_order(x: Tensor, y: Tensor) -> Correction | None:
    """Match rows of y with the most similar rows of x, also if the scales were not reordered with the codes."""
    rows, cols = x.shape
    if rows < 2 or cols < MIN_VALUES:
        return None
    sampled = torch.linspace(0, rows - 1, min(rows, MAX_MATCHED_ROWS), dtype=torch.float64).round().long()
    fit, check = split_halves(Sample(x, y), 1)
    stored_rows = fit.y[sampled]
    cosines = (stored_rows / stored_rows.norm(dim=1, keepdim=True)) @ (fit.x / fit.x.norm(dim=1, keepdim=True)).t()
    best, places = cosines.nan_to_num(-1.0).max(1)
    places = torch.where(cosines.gather(1, sampled[:, None])[:, 0] > best - FACTOR_TOLERANCE, sampled, places)
    if float((best > SAME_VECTOR_COSINE).double().mean()) < AGREEING_SHARE or torch.equal(places, sampled):
        return None
    factors = _fit_factors(fit.x[places], stored_rows, (1,))
    there, stored = check.x[places], check.y[sampled]
    after = max(measure_snr(there, stored - there), measure_snr(there, stored * factors - there))
    before = measure_snr(check.x[sampled], stored - check.x[sampled])
    return Correction(after, after - before, describe_order(sampled.tolist(), places.tolist(), rows))


def describe_order(from_rows: Sequence[int], to_rows: Sequence[int], n: int) -> str:
    """Describe the permutation that takes row ``from_rows[i]`` to row ``to_rows[i]``, among ``n`` rows."""
    pairs = list(zip(from_rows, to_rows, strict=True))

    def fits_most(fits: Callable[[int, int], bool]) -> bool:
        return sum(fits(i, j) for i, j in pairs) > ALIGNED_COSINE * len(pairs)

    if fits_most(lambda i, j: j == i ^ 1):
        return "neighbours are swapped, as with nibbles in the wrong order"
    if fits_most(lambda i, j: i == j):
        return "a few are in other places"
    by = (pairs[0][0] - pairs[0][1]) % n
    if fits_most(lambda i, j: (i - j) % n == by):
        return f"shifted by {by if by <= n // 2 else by - n}"
    if fits_most(lambda i, j: i + j == n - 1):
        return "in reverse"
    runs = max(i ^ j for i, j in pairs)
    if fits_most(lambda i, j: i ^ j == runs) and runs & (runs + 1) == 0:
        return f"reversed within runs of {runs + 1}"
    if fits_most(lambda i, j: i ^ j == runs) and runs & (runs - 1) == 0:
        as_nibbles = ", as with nibbles in the wrong order" if 2 * runs <= MAX_NIBBLE_RUN else ""
        return f"halves of runs of {2 * runs} are swapped{as_nibbles}"
    if isqrt(n) ** 2 == n and fits_most(lambda i, j: j == i % isqrt(n) * isqrt(n) + i // isqrt(n)):
        return "interleaved"
    return "in an irregular order"


ONE_FACTOR = Repair(
    "scale_factor",
    "the scale is off by a factor of {description}",
    "check how the scale is applied: omitted, applied twice, or inverted",
    _try_one_factor,
)

# Simpler repairs come first, as a later one must be clearly better.
REPAIRS = (
    *(
        Repair(
            "scale_factor",
            description,
            "write the scales again as the runtime multiplies codes by them",
            partial(_try_power, power),
        )
        for power, description in SCALE_POWERS.items()
    ),
    ONE_FACTOR,
    Repair(
        "transposed",
        "it is stored transposed{description}",
        "transpose it, or correct its metadata",
        _try_transpose,
    ),
    Repair(
        "permuted",
        "its rows are in a different order ({description})",
        "look for a permutation that only one side undoes",
        _try_row_order,
    ),
    Repair(
        "permuted",
        "its columns are in a different order ({description})",
        "check the order of nibbles and of inputs (act-order, g_idx)",
        _try_column_order,
    ),
    Repair(
        "scale_factor",
        "one factor per row corrects it (rows are {description} times the original's): the row scales are wrong",
        "look for scales that are shifted, truncated, or in a different order than the rows",
        _try_row_factors,
    ),
    Repair(
        "scale_factor",
        "one factor per column corrects it (columns are {description} times the original's)",
        "check whether scales were folded into the preceding layer (AWQ, SmoothQuant) or belong to other columns",
        _try_column_factors,
    ),
    Repair(
        "zero_points",
        "one shift per row corrects it ({description}): its zero points are wrong",
        "check the convention: some formats store zero points minus one",
        _try_row_shifts,
    ),
    Repair(
        "zero_points",
        "one shift per block corrects it ({description}): its zero points are wrong",
        "check the convention: some formats store zero points minus one",
        _try_block_shifts,
    ),
    Repair(
        "scale_factor",
        "one factor per block corrects it (blocks are {description} times the original's): the block scales are wrong",
        "look for scales that are shifted, transposed, or still tiled for a kernel",
        _try_block_factors,
    ),
)
