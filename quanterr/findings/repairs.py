"""Ways to correct a weight, as data, and the simplest that does.

A repair sees a sample of both sides and says what SNR it reaches. What it fits to the original it fits to one half of
the elements, every other row or column, and is judged on the other half: a factor for each block takes away some error
of any weight that it was fitted to.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite, isqrt, log10
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.findings.figures import EXACT_DB, GAIN, GAINS, level_of

FEW = 64  # rows or columns whose like is looked for
LIKE = 0.6  # of a cosine: two rows are the same
AGREE = 0.75  # of the rows
CORRECTED_DB = {2: 4.0}  # bits → SNR that a repair must reach
CORRECTED = 7.0
NEAR_DB = 3.0  # below what the scales allow
BETTER_DB = {2: 5.0}  # bits → by how much it must be better, where one number for all is not enough
BETTER = 4.5  # factors of blocks alone gain 3.5 dB where codes are as coarse as E5M2's
SHIFTED_DB = 5.5  # what a shift must gain: half a step costs 6.0, and what is rounded afterwards in 16 bits up to 5.1
SIMPLER_DB = 2.0  # a later repair must be that much better than an earlier, simpler one
BLOCKS = (16, 32, 64, 128)


class Sample(NamedTuple):
    """The first rows of both sides, float64, (r, c); zero where one is not finite."""

    x: Tensor
    y: Tensor


class Correction(NamedTuple):
    """What a repair leaves of the error."""

    snr_db: float
    gained_db: float  # over the SNR of the same elements before
    description: str  # what was found
    factors: Tensor | None = None  # one for each row or block, (r, 1 or blocks): what y is of the original


class Repair(NamedTuple):
    """One way to correct a weight."""

    code: str
    message: str  # follows "<weight>: "
    remedy: str
    mend: Callable[[Sample], Correction | None]


def simplest(
    sample: Sample, bits: int, attainable_db: float = -inf, has_zero: bool = True
) -> tuple[Repair, Correction] | None:
    """The first repair of REPAIRS that is about as good as any; None where none corrects a weight of this many bits.

    It has to come near what the stored scales allow, where that is known. ``has_zero``: codes are counted from one that
    stands for zero, which may be wrong.
    """
    good = []
    least = max(CORRECTED_DB.get(bits, CORRECTED), attainable_db - NEAR_DB)
    for repair in REPAIRS:
        if repair.code == "zero_points" and not has_zero:
            continue
        better = GAINS.get(bits, GAIN) if repair is ONE_FACTOR else BETTER_DB.get(bits, BETTER)
        better = max(better, SHIFTED_DB) if repair.code == "zero_points" else better
        corrected = repair.mend(sample)
        if corrected and corrected.snr_db >= least and corrected.gained_db > better:
            good.append((repair, corrected))
            if corrected.snr_db > level_of(bits):
                break
    best = max((corrected.snr_db for _, corrected in good), default=inf)
    return next(((repair, corrected) for repair, corrected in good if corrected.snr_db >= best - SIMPLER_DB), None)


def halves(sample: Sample, axis: int) -> tuple[Sample, Sample]:
    """Every other row (axis 0) or column, and the rest; of a single row its columns."""
    if axis == 0 and len(sample.x) > 1:
        return Sample(sample.x[::2], sample.y[::2]), Sample(sample.x[1::2], sample.y[1::2])
    return Sample(sample.x[..., ::2], sample.y[..., ::2]), Sample(sample.x[..., 1::2], sample.y[..., 1::2])


def snr_db(x: Tensor, e: Tensor, fitted: int = 0) -> float:
    """SNR in dB; with so many numbers fitted to these elements, which is paid for."""
    left = e.numel() - fitted
    if left <= 0:
        return -inf
    signal, noise = float(x.square().sum()), float(e.square().sum()) * e.numel() / left
    if not signal or not isfinite(noise):
        return -inf
    return 10 * (log10(signal) - log10(noise)) if noise else EXACT_DB


# Factors and shifts


def _factors(x: Tensor, y: Tensor, axes: tuple[int, ...]) -> Tensor:
    """What y must be multiplied by along these axes; 0 where y is zero.

    1 where noise explains any other: that of y makes the factor smaller than it is, that of x its inverse. Else each
    row or column of codes near zero would be better by being made smaller.
    """
    xx, xy, yy = (product.sum(axes, keepdim=True) for product in (x.square(), x * y, y.square()))
    return (xy / yy).masked_fill((xy < yy) & (xy > 0) & (xx > xy), 1.0).nan_to_num(0.0, 0.0, 0.0)


def _one_factor(sample: Sample) -> Correction | None:
    """One for all, if most rows agree on it."""
    fit, check = halves(sample, 0)
    factor, each = _factors(fit.x, fit.y, (0, 1)), _factors(sample.x, sample.y, (1,))
    agree = float(((each - factor).abs() < (factor - 1).abs() / 2).double().mean())
    if not float(factor) or agree < AGREE:
        return None
    return _corrected(check, check.y * factor, f"{1 / float(factor):.4g}")


def _row_factors(sample: Sample) -> Correction | None:
    fit, check = halves(sample, 1)
    factors = _factors(fit.x, fit.y, (1,))
    return _spread(check, factors)


def _column_factors(sample: Sample) -> Correction | None:
    if len(sample.x) < 2:
        return None
    fit, check = halves(sample, 0)
    factors = _factors(fit.x, fit.y, (0,))
    return _spread(check, factors)


def _blocks(sample: Sample) -> Iterator[tuple[Sample, Sample]]:
    """The halves of both sides as (r, blocks, n / 2) for each size n of block."""
    for n in BLOCKS:
        if not sample.x.shape[1] % n:
            yield halves(Sample(*(side.reshape(side.shape[0], -1, n) for side in sample)), 1)


def _block_factors(sample: Sample) -> Correction | None:
    found = []
    for fit, check in _blocks(sample):
        factors = _factors(fit.x, fit.y, (2,))
        found.append(_spread(check, factors))
    return max(found, key=lambda corrected: corrected.snr_db, default=None)


def _spread(check: Sample, factors: Tensor) -> Correction:
    used = 1 / factors[factors != 0]
    description = f"{float(used.min()):.3g} to {float(used.max()):.3g}" if used.numel() else "0"
    corrected = _corrected(check, check.y * factors, description)
    return corrected._replace(factors=1 / factors.squeeze(2) if factors.dim() == 3 else 1 / factors)


def _corrected(check: Sample, y: Tensor, description: str) -> Correction:
    """What is left of the error of elements to which nothing was fitted; ``y`` are theirs once corrected."""
    after = snr_db(check.x, y - check.x)
    return Correction(after, after - snr_db(check.x, check.y - check.x), description)


def _row_shifts(sample: Sample) -> Correction | None:
    fit, check = halves(sample, 1)
    shifts = (fit.y - fit.x).mean(1, keepdim=True)
    return _corrected(check, check.y - shifts, _on_average(shifts))


def _block_shifts(sample: Sample) -> Correction | None:
    found = []
    for fit, check in _blocks(sample):
        shifts = (fit.y - fit.x).mean(2, keepdim=True)
        found.append(_corrected(check, check.y - shifts, _on_average(shifts)))
    return max(found, key=lambda corrected: corrected.snr_db, default=None)


def _on_average(shifts: Tensor) -> str:
    return f"{float(shifts.mean()):.3g} on average"


# Order


def _transposed(sample: Sample) -> Correction | None:
    n = min(sample.x.shape)
    corner = Sample(sample.x[:n, :n], sample.y[:n, :n])
    return _corrected(corner, corner.y.t(), "") if n > 3 else None


def _row_order(sample: Sample) -> Correction | None:
    return _reordered(sample.x, sample.y)


def _column_order(sample: Sample) -> Correction | None:
    return _reordered(sample.x.t(), sample.y.t())


def _reordered(x: Tensor, y: Tensor) -> Correction | None:
    """Rows of y beside those rows of x that are most alike; scales may not have moved with them."""
    rows, cols = x.shape
    if rows < 2 or cols < 8:
        return None
    few = torch.linspace(0, rows - 1, min(rows, FEW), dtype=torch.float64).round().long()
    fit, check = halves(Sample(x, y), 1)
    own = fit.y[few]
    alike = (own / own.norm(dim=1, keepdim=True)) @ (fit.x / fit.x.norm(dim=1, keepdim=True)).t()
    best, places = alike.nan_to_num(-1.0).max(1)
    if float((best > LIKE).double().mean()) < AGREE or torch.equal(places, few):
        return None
    factors = _factors(fit.x[places], own, (1,))
    there, stored = check.x[places], check.y[few]
    after = max(snr_db(there, stored - there), snr_db(there, stored * factors - there))
    before = snr_db(check.x[few], stored - check.x[few])
    return Correction(after, after - before, order_of(few.tolist(), places.tolist(), rows))


def order_of(own: Sequence[int], there: Sequence[int], n: int) -> str:
    """In words what brings row i of ``own`` to where it belongs, one of ``n``."""
    pairs = list(zip(own, there, strict=True))

    def most(fits: Callable[[int, int], bool]) -> bool:
        return sum(fits(i, j) for i, j in pairs) > 0.9 * len(pairs)

    if most(lambda i, j: j == i ^ 1):
        return "neighbours are swapped, as nibbles in the wrong order are"
    by = (pairs[0][0] - pairs[0][1]) % n
    if most(lambda i, j: (i - j) % n == by):
        return f"shifted by {by if by <= n // 2 else by - n}"
    if most(lambda i, j: i + j == n - 1):
        return "in reverse"
    runs = max(i ^ j for i, j in pairs)
    if most(lambda i, j: i ^ j == runs) and runs & (runs + 1) == 0:
        return f"reversed within runs of {runs + 1}"
    if most(lambda i, j: i ^ j == runs) and runs & (runs - 1) == 0:
        return f"halves of runs of {2 * runs} are swapped, as nibbles in the wrong order are"
    if isqrt(n) ** 2 == n and most(lambda i, j: j == i % isqrt(n) * isqrt(n) + i // isqrt(n)):
        return "interleaved"
    return "in an irregular order"


ONE_FACTOR = Repair(
    "scale_factor",
    "the scale is off by a factor of {description}",
    "check how the scale is applied: omitted, applied twice, or inverted",
    _one_factor,
)

# The simpler ones first: each later one must be clearly better.
REPAIRS = (
    ONE_FACTOR,
    Repair(
        "transposed",
        "it is stored transposed",
        "transpose it, or correct its metadata",
        _transposed,
    ),
    Repair(
        "permuted",
        "its rows are in another order ({description})",
        "look for a permutation that only one side undoes",
        _row_order,
    ),
    Repair(
        "permuted",
        "its columns are in another order ({description})",
        "check the order of nibbles and of inputs (act-order, g_idx)",
        _column_order,
    ),
    Repair(
        "scale_factor",
        "one factor per row corrects it (rows are {description} times the original's): the row scales are wrong",
        "look for scales that are shifted, truncated or in another order than the rows",
        _row_factors,
    ),
    Repair(
        "scale_factor",
        "one factor per column corrects it (columns are {description} times the original's)",
        "scales were folded into the layer before (AWQ, SmoothQuant), or belong to other columns",
        _column_factors,
    ),
    Repair(
        "zero_points",
        "one shift per row corrects it ({description}): its zero points are wrong",
        "check the convention: some formats store zero points minus one",
        _row_shifts,
    ),
    Repair(
        "zero_points",
        "one shift per block corrects it ({description}): its zero points are wrong",
        "check the convention: some formats store zero points minus one",
        _block_shifts,
    ),
    Repair(
        "scale_factor",
        "one factor per block corrects it (blocks are {description} times the original's): the block scales are wrong",
        "look for scales that are shifted, transposed, or still tiled for a kernel",
        _block_factors,
    ),
)
