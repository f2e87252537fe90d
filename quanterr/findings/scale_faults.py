"""Scales that are wrong although the codes are right: by a factor, by steps of zero points, or in another order.

A program that loses a scale, or applies it twice, does not change the codes. Their errors then look as if other values
had been quantized, but once the fault is undone, the codes are the nearest to the original. These faults are tried on a
sample:

factor  y = f · x. Each code is the nearest to f · x on the grid of the stored scales. The least-squares fit of y to
        these nearest values gives f again. Unlike the fit of y to x, it is not biased by rounding, and exact if all
        codes agree.
rows    A factor for each row.
blocks  A factor for the groups whose scales share a scale, or, for 8-bit codes, for each group: with fewer bits, a
        factor of a group looks like values that were always rounded down.
zeros   In most groups, values agree with their codes, and in the others they are whole steps away, measured by the
        median of (y - x) / step. Or, if errors compensate each other, the mean error of some groups is about a step or
        more: in real weights by GPTQ, 0.02 % of groups of 32 have 0.7 steps, and no groups of 128 have half a step.
order   The group whose scales fit a column best is chosen on each half of the rows. If both choices agree, and many
        columns choose another group than their own, the order of columns (g_idx), or of groups, was lost. If only a
        few columns do, the other group must fit far better: in real weights by GPTQ with act-order, it fits by up to
        1.9 dB better, and for columns with exchanged entries of g_idx by 5 dB or more if they lose as much.

Values that are added after the multiplication by scales (minima, a low-rank branch) are subtracted from both sides in a
second attempt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.code_samples import CodeSample
from quanterr.findings.codes import make_finding
from quanterr.findings.error_figures import BF16_ERROR
from quanterr.findings.layers import WeightSummary, rate_repair
from quanterr.findings.limits import (
    AGREEING_SHARE,
    ALIGNED_COSINE,
    BIT_DB,
    DOUBLE_DB,
    FACTOR_TOLERANCE,
    FINE_DB,
    FLOAT32_TOLERANCE,
    MAJOR_SHARE,
    MIN_VALUES,
    NEGLIGIBLE_SHARE,
    SMALL_DB,
)
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import level
from quanterr.pairing.model import Pair
from quanterr.samples.good_scales import order_columns
from quanterr.samples.scales import LEVELS_OF_BYTE
from quanterr.util.text import count, display, itemize

MAX_ROUNDS = 8  # maximum number of rounds of a fit of a factor; each reduces the deviation to less than a third
MISSED_RATIO = 4  # a correction must reduce the number of codes that are not the nearest by this factor
MIN_STEPS_OFF = 0.25  # minimum distance of another code from the nearest one, in steps
MAX_PRODUCTS = 1 << 27  # maximum number of products of codes and scales of groups to try
FLOAT32_DIGITS = 7
MEANS_GAIN_DB = 0.2  # minimum gain of moved means; 0.7 steps in 1 % of groups add more to rounding errors
MIN_MEAN_STEPS = 0.7  # mean error of a group, in steps, above which its zero point is wrong
FOUR_LEVELS = 4  # codes of so few levels differ from values by up to half of these, so that they show no factor
# Maximum root mean square of the distances of medians from whole steps. The median of 32 rounding errors scatters by
# 0.09, that of 32 compensated errors by 0.1; the distance of random numbers from whole ones is 0.29.
MAX_STEP_SCATTER = 0.15
MIN_MOVED_GROUPS = 8  # in fewer groups, random numbers are so near to whole ones with a probability above 0.4 %

# The faults that are tried together.
FACTOR_FAULTS, ORDER_FAULTS, COLUMN_FAULTS = (
    ("factor", "rows", "blocks"),
    ("zeros", "order", "groups"),
    ("columns", "zeros"),
)


class ScaleFault(NamedTuple):
    """The fault of a weight's scales, and the SNR of a sample before and after it is undone."""

    name: str  # a name in FACTOR_FAULTS, ORDER_FAULTS or COLUMN_FAULTS
    low: float  # the smallest factor, or number of steps of zero points; 1 for orders
    high: float
    before_db: float
    after_db: float
    columns: tuple[int, ...] = ()


def find_scale_fault(pair: Pair, sample: CodeSample) -> ScaleFault | None:
    """Return the simplest fault of scales that explains a sample of a weight; None if none does."""
    sample = _drop_nonfinite(sample)
    if sample.levels.number <= FOUR_LEVELS:
        return _try_zero_points(pair, sample)
    of_codes = None if sample.shift is None else _remove_shift(sample)
    samples = [sample] if of_codes is None else [sample, of_codes]
    width = _find_block_width(pair)
    for fault_name in FACTOR_FAULTS:
        for candidate in samples:
            if fault_name != "blocks":
                fault = _try_factors(candidate, fault_name)
            else:
                fault = (
                    _try_factors(candidate.split(width), fault_name)
                    if width and candidate.x.shape[1] % width == 0
                    else None
                )
            if fault:
                return fault
    return _try_zero_points(pair, sample) or _try_order(pair, sample) or _try_mean_errors(pair, sample)


def _find_block_width(pair: Pair) -> int:
    """Return the number of columns whose scales share a scale, or of a group of 8-bit codes; 0 if there are none."""
    weight = pair.quantized.unrotated
    steps, block, levels = weight.scale_steps, weight.block_size, weight.levels
    if block is None or levels is None:
        return 0
    if steps:
        return 0 if steps.of_largest else steps.shared * block[1]
    return block[1] if levels.number >= LEVELS_OF_BYTE and block[1] >= MIN_VALUES else 0


def find_factor(sample: CodeSample) -> ScaleFault | None:
    """Return the factor by which all scales of a weight are wrong; None if its codes do not show one."""
    return _try_factors(_drop_nonfinite(sample), "factor") if sample.levels.number > FOUR_LEVELS else None


def _drop_nonfinite(sample: CodeSample) -> CodeSample:
    """Return the sample with zeros in place of values that are not finite on one side."""
    finite = sample.x.isfinite() & sample.y.isfinite()
    return sample._replace(x=sample.x.where(finite, 0.0), y=sample.y.where(finite, 0.0))


def _remove_shift(sample: CodeSample) -> CodeSample:
    """Return the part of both sides that the scales multiply."""
    assert sample.shift is not None  # noqa: S101
    return sample._replace(x=sample.x - sample.shift, y=sample.y - sample.shift, shift=None)


def _try_factors(sample: CodeSample, fault_name: str) -> ScaleFault | None:
    """Try one factor for all elements, or one for each row of the sample."""
    by_row = fault_name != "factor"
    missed = _find_missed(sample, 1.0)
    if missed < NEGLIGIBLE_SHARE:
        return None
    factors = _fit_factors(sample, by_row)
    if not bool((factors > 0).all()) or float((factors - 1).abs().median()) <= BF16_ERROR:
        return None
    if MISSED_RATIO * _find_missed(sample, factors) > missed:
        return None
    low, high = float(factors.min()), float(factors.max())
    before, after = sample.y - sample.x, sample.y / factors - sample.x
    before_db, after_db = _measure(sample.x, before, after)
    gained_db = (before.square().sum(1) / after.square().sum(1)).nan_to_num(1.0).log10().amax() * 10
    if by_row and after_db - before_db < SMALL_DB and float(gained_db) < BIT_DB:
        return None  # coarse codes show the factors of a fold inexactly
    return ScaleFault(fault_name, low, high, before_db, after_db)


def _fit_factors(sample: CodeSample, by_row: bool) -> Tensor:
    """Return the f of y = f · x, (1 or r, 1); 1 where it is undefined, as all values or codes are zero."""
    dims = (1,) if by_row else (0, 1)
    _, inside = sample._replace(x=sample.y).find_nearest()  # clipped values would bias the factor

    def improve(factors: Tensor) -> Tensor:
        for _ in range(MAX_ROUNDS):
            nearest, within = sample.find_nearest(factors)
            nearest = nearest.where(within & inside, 0.0)
            products = (sample.y * nearest).sum(dims, keepdim=True)
            better = _divide(products, nearest.square().sum(dims, keepdim=True)) * factors
            if torch.equal(better, factors):  # further rounds would change nothing
                break
            factors = better
        return factors

    first = _divide(sample.y.square().sum(dims, keepdim=True), (sample.x * sample.y).sum(dims, keepdim=True))
    if by_row:
        factors = improve(first)
        return factors.where(factors != 0, 1.0)
    # Codes agree with all factors in a small range, whose ends these two fits find; the roundest factor is likely.
    ends = [float(improve(first * start)) for start in (1 - FACTOR_TOLERANCE, 1 + FACTOR_TOLERANCE)]
    return first.new_full(
        (1, 1), _choose_round_number(min(ends) * (1 - FLOAT32_TOLERANCE), max(ends) * (1 + FLOAT32_TOLERANCE))
    )


def _choose_round_number(low: float, high: float) -> float:
    """Return the number with the smallest number of digits in a range; the middle if all need those of a float32."""
    middle = (low + high) / 2
    rounded = (float(f"{middle:.{digits}g}") for digits in range(1, FLOAT32_DIGITS))
    return next((number for number in rounded if low <= number <= high), middle)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() / b.double()).nan_to_num(0.0, 0.0, 0.0).float()


def _find_missed(sample: CodeSample, factor: Tensor | float) -> float:
    """Return the share of elements in range whose code is not the nearest to ``factor`` · x; 0 if these are few."""
    cells = sample.find_cells(factor)
    missed = (sample.y - cells.nearest).abs() > MIN_STEPS_OFF * cells.width
    missed_in_range = missed[cells.inside & (sample.x != 0)]
    return float(missed_in_range.float().mean()) if len(missed_in_range) >= MIN_VALUES else 0.0


def _try_zero_points(pair: Pair, sample: CodeSample) -> ScaleFault | None:
    """Try to move the values of each group by whole steps."""
    block, cols, levels = pair.quantized.unrotated.block_size, sample.x.shape[1], sample.levels
    if sample.shift is None or levels.table or levels.mantissa or (block and (block[0] != 1 or cols % block[1])):
        return None
    groups = cols // block[1] if block else 1
    unit = sample.unit.view(len(sample.x), groups, -1)
    if not _are_in_order(unit):
        return None
    medians = ((sample.y - sample.x).view_as(unit) / unit).median(2).values
    steps = medians.round()
    moved_steps = steps[steps != 0]
    if (
        len(moved_steps) < MIN_MOVED_GROUPS
        or float((medians - steps)[steps != 0].square().mean().sqrt()) > MAX_STEP_SCATTER
    ):
        return None
    moved = (steps[..., None] * unit).view_as(sample.x)
    before_db, after_db = _measure(sample.x, sample.y - sample.x, sample.y - moved - sample.x)
    if after_db - before_db < SMALL_DB or before_db > FINE_DB:
        return None
    return ScaleFault("zeros", float(moved_steps.min()), float(moved_steps.max()), before_db, after_db)


def _try_order(pair: Pair, sample: CodeSample) -> ScaleFault | None:
    """Try the scales of the best-fitting group for each column."""
    block, (rows, cols) = pair.quantized.unrotated.block_size, sample.x.shape
    if block is None or block[0] != 1 or cols % block[1] or block[1] == 1 or rows < 2 * MIN_VALUES:
        return None
    groups, width = cols // block[1], block[1]
    if groups < 2 or rows * cols * groups > MAX_PRODUCTS:
        return None
    in_order = _are_in_order(sample.unit.view(rows, groups, -1))
    order = torch.arange(cols) if in_order else order_columns(width, sample.unit)
    if order is None or not bool((sample.unit != 0).all()):
        return None
    if not in_order:
        x, y, unit = (side[:, order] for side in (sample.x, sample.y, sample.unit))
        sample = CodeSample(x, y, unit, None if sample.shift is None else sample.shift[:, order], sample.levels)
    errors = torch.stack([_try_groups(sample, width, range(half, rows, 2)) for half in (0, 1)])
    first, second = errors.argmin(1)  # the group of each column
    own_groups = torch.arange(cols) // width
    moved = (first == second) & (first != own_groups)
    if (
        not in_order
        or float((first == second).float().mean()) < AGREEING_SHARE
        or float(moved.float().mean()) < MAJOR_SHARE
    ):
        if "order" not in pair.quantized.parts:  # without a stored order, single columns cannot have another group
            return None
        fault = _find_few_columns(sample, errors, moved, own_groups)
        return fault and fault._replace(columns=tuple(sorted(order[list(fault.columns)].tolist())))
    before, after = (float(errors[1].gather(0, chosen[None]).double().sum()) for chosen in (own_groups, first))
    if level(before, after) < SMALL_DB:
        return None
    signal = float(sample.x[1::2].double().square().sum())
    by_group = first.view(groups, -1)
    together = float((by_group == by_group.mode(1, keepdim=True).values).float().mean()) > ALIGNED_COSINE
    return ScaleFault("groups" if together else "order", 1.0, 1.0, level(signal, before), level(signal, after))


def _find_few_columns(sample: CodeSample, errors: Tensor, moved: Tensor, own_groups: Tensor) -> ScaleFault | None:
    """Return the fault of columns that the scales of another group fit far better than their own, if there are any.

    Smaller scales also fit a column with much compensated error, so the other group must fit better than any factor.

    Args:
        sample: with the columns of each group next to each other.
        errors: squared error of each column in either half of the rows, (2, groups, c), with the scales of each group.
        moved: columns that another group fits best in both halves, (c,).
        own_groups: the group of each column, (c,).
    """
    smallest, stored = errors.amin(1), errors.gather(1, own_groups.expand(2, 1, -1))[:, 0]
    sides = [(sample.x[half::2], sample.y[half::2]) for half in (0, 1)]
    best = torch.stack([x.square().sum(0) - (x * y).sum(0).square() / y.square().sum(0) for x, y in sides])
    better = (smallest * 10 ** (DOUBLE_DB / 10) < stored) & (smallest * 10 ** (SMALL_DB / 10) < best)
    moved = moved & better.all(0)
    if not bool(moved.any()):
        return None
    sides_of_moved = (side[..., moved].double() for side in (sample.x.square(), stored, smallest))
    signal, before, after = (float(side.sum()) for side in sides_of_moved)
    columns = tuple(moved.nonzero().flatten().tolist())
    return ScaleFault("columns", 1.0, 1.0, level(signal, before), level(signal, after), columns)


def _are_in_order(unit: Tensor) -> bool:
    """Return True if the columns of a group, (r, groups, columns), share a scale, and none is zero."""
    return bool((unit != 0).all()) and torch.allclose(unit, unit[..., :1].expand_as(unit), FLOAT32_TOLERANCE, 0.0)


def _try_groups(sample: CodeSample, width: int, rows: range) -> Tensor:
    """Return the squared error of each column, (groups, c), with the scales of each group."""
    x, y, unit, shift = (None if side is None else side[rows] for side in sample[:4])
    assert x is not None and y is not None and unit is not None  # noqa: S101, PT018
    codes = (y if shift is None else y - shift) / unit
    errors = []
    for col in range(0, x.shape[1], width):
        values = codes * unit[:, col : col + 1]
        values = values if shift is None else values.add_(shift[:, col : col + 1])
        errors.append(values.sub_(x).square_().sum(0))
    return torch.stack(errors)


def _try_mean_errors(pair: Pair, sample: CodeSample) -> ScaleFault | None:
    """Try to move the zero points of groups whose mean error is a step or more by whole steps."""
    block, (rows, cols) = pair.quantized.unrotated.block_size, sample.x.shape
    if sample.shift is None or block is None or block[0] != 1 or block[1] < MIN_VALUES or cols % block[1]:
        return None
    error, unit = (side.view(rows, -1, block[1]) for side in (sample.y - sample.x, sample.unit))
    if not _are_in_order(unit):
        return None
    means = (error / unit).mean(2, keepdim=True)
    steps_off = torch.where(means.abs() > MIN_MEAN_STEPS, means.round(), 0.0)
    if float((steps_off != 0).float().mean()) < NEGLIGIBLE_SHARE:
        return None
    before_db, after_db = _measure(sample.x, error, error - steps_off * unit)
    if after_db - before_db < MEANS_GAIN_DB or before_db > FINE_DB:
        return None
    steps = steps_off[steps_off != 0]
    return ScaleFault("zeros", float(steps.min()), float(steps.max()), before_db, after_db)


def _measure(x: Tensor, before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the SNR in dB of both errors."""
    signal, *noise = (float(side.double().square().sum()) for side in (x, before, after))
    return level(signal, noise[0]), level(signal, noise[1])


# Fault → code of the finding, what is wrong with the weights, and what to do.
FINDINGS_BY_FAULT = {
    "factor": (
        "scale_factor",
        "it is the original times {factors}, one factor for each weight: the scales are wrong",
        "check how the scales are applied: omitted, applied twice, or inverted",
    ),
    "rows": (
        "scale_factor",
        "one factor for each row corrects it (rows are {factors} times the original's): the scales of rows are "
        "wrong or were lost",
        "look for scales of rows that were lost, or are in another order than the rows",
    ),
    "blocks": (
        "scale_factor",
        "one factor for each group or superblock corrects it (they are {factors} times the original's): their scales "
        "are wrong",
        "quantize again; if the error returns, the quantizer writes wrong scales, or rounds them to too few bits",
    ),
    "zeros": (
        "zero_points",
        "zero points of groups are off by whole steps ({factors})",
        "quantize again; if the error returns, the quantizer writes wrong zero points",
    ),
    "order": (
        "permuted",
        "columns have the scales of other groups: the order of columns (act-order, g_idx) was lost",
        "write the order of columns (g_idx, weight_g_idx) again, or quantize without act-order",
    ),
    "groups": (
        "permuted",
        "groups of columns have each other's scales",
        "find out where the scales were moved, and write them again",
    ),
    "columns": (
        "permuted",
        "a few columns ({factors}) have the scales of other groups",
        "write the order of columns (g_idx, weight_g_idx) again, or quantize without act-order",
    ),
}


def report_scale_faults(
    faults: Sequence[tuple[WeightSummary, ScaleFault]], lossy: Sequence[WeightSummary], read: int
) -> Iterator[Finding]:
    """Report faults of scales, with one finding for each fault.

    Args:
        faults: the weights with a fault, and the fault.
        lossy: all weights that lost more than rounding costs; if all that were read have the same fault, it is
            reported for all of these.
        read: number of weights that were read.
    """
    for fault_name, (code, what, remedy) in FINDINGS_BY_FAULT.items():
        affected = [(weight, fault) for weight, fault in faults if fault.name == fault_name]
        if not affected:
            continue
        names = [
            weight.pair.name for weight in (lossy if len(affected) == read > 1 else [weight for weight, _ in affected])
        ]
        factors = [factor for _, fault in affected for factor in (fault.low, fault.high)]
        worst = min((fault for _, fault in affected), key=lambda fault: fault.before_db)
        shown = itemize([str(column) for column in worst.columns], 3) if worst.columns else _format_range(factors)
        again = f", of which {read} were read again" if len(names) > len(affected) else ""
        whose = f"{count(len(names), 'weight')}{again} ({itemize(names, 3)})" if len(names) > 1 else display(names[0])
        yield make_finding(
            code,
            "warning" if fault_name == "columns" else rate_repair(worst.before_db, worst.after_db),
            names[0] if len(names) == 1 else None,
            f"{whose}: {what.format(factors=shown)}; "
            f"{worst.after_db:.1f} dB once corrected instead of {worst.before_db:.1f}, on a sample of the worst",
            remedy,
            layers=names,
            factors=[min(factors), max(factors)],
            snr_db=worst.before_db,
            snr_db_repaired=worst.after_db,
        )


def _format_range(factors: Sequence[float]) -> str:
    """Return ``0.8``, or ``0.8 to 0.9`` if the factors differ in the digits shown."""
    low, high = f"{min(factors):.4g}", f"{max(factors):.4g}"
    return low if low == high else f"{low} to {high}"
