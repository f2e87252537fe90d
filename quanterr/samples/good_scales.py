"""The quality of a weight's scales: the squared errors of its groups with the stored scales and with good ones.

A good scale is computed from the original, for each group of the format: with it, the largest value of the group gets
the largest code, and the zero point is where the range of values requires it. Good scales are rounded to powers of two
if the stored ones are. Values are divided by their stored units first, so that factors of columns, low-rank branches
and rotations are applied as the format does: a good scale is the stored scale times a number for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp
from typing import NamedTuple

from quanterr.kernel.levels import FLOAT32_MANTISSA, Levels, Scaling
from quanterr.lazy_torch import Tensor, torch

MAX_UNIT_DIFFERENCE = 0.05  # relative, between units of elements that share a scale, apart from column factors
MAX_ZERO_POINT = 1e-6  # zero points up to this share of the largest level count as zero
# In codes: if a zero point varies by more within a group, the shift comes from a low-rank branch.
MAX_ZERO_VARIATION = 0.01
MAX_ZERO_DIFFERENCE = 0.05  # in codes: zero points of groups that differ by less count as equal
MAX_SCALE_DIFFERENCE = 0.01  # relative: scales that differ by less count as equal
CODES_OF_BYTE = 256  # number of codes of a byte
MIN_NORMAL_MULTIPLE = 64.0  # the rounding of larger values is relative, as multiples of the smallest normal number
MIN_LOSS_RATIO_OF_SCALES = 1.2  # a smaller multiple of the loss with good scales counts as no loss
MAX_SEARCHED_LEVELS = 16  # with more levels, no search is needed, as the scale that clips nothing is nearly the best
SEARCHED_MULTIPLES = (1.0, 0.7, 0.775, 0.85, 0.925, 1.075, 1.15, 1.225, 1.3)  # times the scale that clips nothing
MAX_PART_RATIO = 4.0  # a group's largest value may be this multiple of the largest value of a part


class ScaleGroups(NamedTuple):
    """Blocks of (rows, cols) elements that share a scale; a matrix has whole numbers of blocks."""

    rows: int
    cols: int
    whole: bool = True  # False: groups are incomplete

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of each group, (groups down, groups across)."""
        return self._split(values).amax(3).amax(1)

    def max_of_units(self, unit: Tensor, shape: torch.Size) -> Tensor:
        """Return the largest number of each group, of numbers (1 or r, 1 or c) that rows or columns share."""
        if unit.shape[1] > 1:
            return self.max(unit.expand(shape))
        down, across = shape[0] // self.rows, shape[1] // self.cols
        return unit.expand(shape[0], 1).reshape(down, self.rows).amax(1, keepdim=True).expand(down, across)

    def min(self, values: Tensor) -> Tensor:
        """Return the smallest value of each group."""
        return self._split(values).amin(3).amin(1)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of each group, float64."""
        return self._split(values).sum(3).sum(1, dtype=torch.float64)

    def spread(self, of_groups: Tensor) -> Tensor:
        """Repeat the number of each group for its elements, (r, c), or for rows, (r, 1), if groups are whole rows."""
        down, across = of_groups.shape
        if across == 1:
            return of_groups.expand(down, self.rows).reshape(-1, 1)
        spread = of_groups[:, None, :, None].expand(down, self.rows, across, self.cols)
        return spread.reshape(down * self.rows, across * self.cols)

    def _split(self, values: Tensor) -> Tensor:
        rows, cols = values.shape
        return values.reshape(rows // self.rows, self.rows, cols // self.cols, self.cols)


class Losses(NamedTuple):
    """Squared losses and scales of groups, (groups down, groups across) float64 each."""

    x_sq: Tensor
    stored_sq: Tensor  # squared error of the nearest codes with the stored scales
    good_sq: Tensor  # the same with good scales; (2, …), by two rules, if scales are powers of two
    worst_sq: Tensor  # squared error if every nonzero element were half a step off
    needed: Tensor  # good scale / stored scale
    used: Tensor  # the share of the range in use: ``needed``, computed from the stored values
    stored: Tensor  # stored scale as a factor of codes
    good: Tensor  # good scale as a factor of codes
    moved: Tensor  # distance of the value of the lowest level from that with good scales
    lowest: Tensor  # magnitude of the value of the lowest level with good scales


def measure_losses(
    levels: Levels,
    x: Tensor,
    e: Tensor | None,
    scales: Scaling,
    groups: ScaleGroups,
    largest: float | None = None,
    y: Tensor | None = None,
    one_zero: bool | None = None,
) -> Losses:
    """Measure the losses of the groups of ``x``, (r, c) float32, with the stored ``scales`` and with good ones.

    ``e``, if known, is the error of the nearest codes with the stored scales. ``largest`` is the largest magnitude of
    the original, if one group covers the weight and ``x`` is a part of it. ``y`` holds the stored values, if their
    codes are not the nearest. ``one_zero`` states whether all groups of the weight share a zero point; if None, these
    groups decide.
    """
    unit, shift = scales
    none, stored = unit == 0, groups.max_of_units(unit.abs(), x.shape)
    lost = groups.min(none.float().expand(x.shape)) > 0 if bool(none.any()) else None
    if lost is not None:
        x, e = _zero_uncoded(x, none, groups), None
        unit = unit.masked_fill(none, 1.0)
        shift = _share_zero_point(levels, shift, unit, groups, lost, x.shape)
    codes = (x - shift if shift is not None else x) / unit
    zeros = None if shift is None else _find_zeros(levels, shift, unit, groups, codes.shape)
    if one_zero is None:
        one_zero = zeros is None or _are_equal(zeros)
    needed, start, first = _find_needed(levels, codes, zeros, groups, one_zero)
    whole = zeros is not None and not one_zero and bool(((zeros - zeros.round()).abs() < MAX_ZERO_VARIATION).all())
    used = needed
    if y is not None:
        used = _find_needed(levels, (y - shift if shift is not None else y) / unit, zeros, groups, one_zero)[0]
    if not groups.whole:
        needed = _estimate_whole(needed, unit, levels, largest)
    live = needed > 0
    needed = (needed / _find_share_used(levels, needed, live)).masked_fill(~live, 1.0)
    x_sq = groups.sum(x.square())
    size = stored if lost is None else torch.where(lost, groups.max_of_units(unit.abs(), x.shape), stored)
    good, moved = needed * size, (levels.lowest - start - (levels.lowest - first) * needed) * size
    lowest = moved.abs() if zeros is None else ((start + (levels.lowest - first) * needed - zeros) * size).abs()
    of_groups = [numbers.double() for numbers in (needed, used, stored, good, moved.abs(), lowest)]
    if _lose_nothing(levels, needed):
        usual_sq = x_sq / 6 / 4 ** (levels.mantissa + 1)
        return Losses(x_sq, usual_sq, usual_sq[None], torch.zeros_like(x_sq), *of_groups)
    if e is None:
        e = levels.nearest(codes).sub_(codes).mul_(unit)
    stored_sq = groups.sum(e.square())
    powers = _are_powers_of_two(unit)
    rounded = _round_to_powers(levels, needed) if powers else [needed * size for size in list_multiples(levels)]
    good_sq, starts, firsts = [], groups.spread(start), groups.spread(first)
    for factor in rounded:
        sizes = groups.spread(factor)
        if whole and zeros is not None:
            start = zeros - ((zeros - start) / factor).round() * factor
            starts = groups.spread(start)
        ideal = codes / sizes if zeros is None else (codes - starts).div_(sizes).add_(firsts)
        error = levels.nearest(ideal).sub_(ideal).mul_(sizes).mul_(unit)
        good_sq.append(groups.sum(error.square_()))
    if not powers:  # the smallest of a short search in each group
        good_sq = [torch.stack(good_sq).amin(0)]
    if levels.mantissa:
        worst_sq = x_sq / 4 ** (levels.mantissa + 1)
    elif not bool((stored_sq > MIN_LOSS_RATIO_OF_SCALES * good_sq[-1]).any()):
        worst_sq = torch.zeros_like(x_sq)
    else:
        half = levels.room(ideal) if levels.table else 0.5
        coded = torch.ne(x, 0, out=torch.empty_like(x))  # numbers, as multiplying by booleans is ten times slower
        worst_sq = groups.sum((groups.spread(needed) * unit * half).square() * coded)
    if lost is not None:  # each value of a group without a scale is its shift
        lost_sq = x_sq if scales.shift is None else groups.sum((x - scales.shift).square())
        stored_sq = torch.where(lost, lost_sq, stored_sq)
        good_sq = [torch.where(lost & (x_sq == 0), 0.0, group_sq) for group_sq in good_sq]
    return Losses(x_sq, stored_sq, torch.stack(good_sq), worst_sq, *of_groups)


def measure_part_losses(
    levels: Levels, x: Tensor, unit: Tensor, of_groups: Losses, groups: ScaleGroups, width: int
) -> Losses:
    """Measure the losses of parts of rows, ``width`` columns each, of groups whose scales are too large.

    ``levels`` are floats, for which a large scale does no harm except to values that are so small that their codes are
    subnormal, which may not be visible in the group as a whole. ``unit`` is the factor of the codes of ``x``, (r, c).
    """
    good = of_groups.needed.float()
    if _are_powers_of_two(unit):
        good = _round_to_powers(levels, good)[0]
    parts, codes, needed = ScaleGroups(1, width), x / unit, groups.spread(good).expand(x.shape)
    stored_sq, good_sq = (
        parts.sum(((levels.nearest(codes / by) * by - codes) * unit).square())
        for by in (torch.ones_like(needed), needed)
    )
    by = parts.max(needed).double()
    stored = parts.max(unit.abs().expand(x.shape)).double()
    none_sq = torch.zeros_like(stored_sq)
    return Losses(
        parts.sum(x.square()), stored_sq, good_sq[None], none_sq, by, by, stored, stored * by, none_sq, none_sq
    )


def has_one_zero(levels: Levels, scales: Scaling, groups: ScaleGroups, shape: torch.Size) -> bool | None:
    """Return whether all these groups share a zero point; None if unknown."""
    unit, shift = scales
    if shift is None or bool((unit == 0).any()):
        return None
    zeros = _find_zeros(levels, shift, unit, groups, shape)
    return None if zeros is None else _are_equal(zeros)


def _find_needed(
    levels: Levels, codes: Tensor, zeros: Tensor | None, groups: ScaleGroups, one_zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factor by which the steps of each group must grow to cover ``codes``, (r, c), the start and its level.

    The start is the code that gets this level. Both are the zero point, except that the level is the lowest one if
    groups have different zero points.
    """
    high, low = groups.max(codes), groups.min(codes)
    if zeros is None:
        zero = torch.zeros_like(high)
        up = high / levels.highest if levels.highest > 0 else zero
        down = low / levels.lowest if levels.lowest < 0 else zero
        return torch.maximum(up, down), zero, zero
    if one_zero:  # the values on each side of the zero point must fit
        above, below = levels.highest - zeros, zeros - levels.lowest
        up = torch.where(above > 0, (high - zeros) / above.clamp(min=1e-30), 0.0)
        down = torch.where(below > 0, (zeros - low) / below.clamp(min=1e-30), 0.0)
        return torch.maximum(up, down), zeros, zeros
    start = torch.minimum(low, zeros)
    needed = (torch.maximum(high, zeros) - start) / (levels.highest - levels.lowest)
    return needed, start, torch.full_like(low, levels.lowest)


def _zero_uncoded(x: Tensor, none: Tensor, groups: ScaleGroups) -> Tensor:
    """Return ``x`` with zeros for elements without a code, as in sparse weights, except in groups without any code."""
    none = none.expand(x.shape)
    pruned = none & (groups.spread(groups.min(none.float())) == 0)
    return x.masked_fill(pruned, 0.0)


def _find_zeros(levels: Levels, shift: Tensor, unit: Tensor, groups: ScaleGroups, shape: torch.Size) -> Tensor | None:
    """Return the code whose value is zero in each group; None if it is always 0, or varies within a group."""
    zeros = (-shift / unit).expand(shape)
    if not bool((zeros.abs() > MAX_ZERO_POINT * levels.largest).any()):
        return None
    high, low = groups.max(zeros), groups.min(zeros)
    return None if bool((high - low > MAX_ZERO_VARIATION * (1 + high.abs())).any()) else (high + low) / 2


def _share_zero_point(
    levels: Levels, shift: Tensor | None, unit: Tensor, groups: ScaleGroups, lost: Tensor, shape: torch.Size
) -> Tensor | None:
    """Return the shifts; groups without a scale, whose zero points are unknown, get that of all other groups."""
    zeros = None if shift is None else _find_zeros(levels, shift, unit, groups, shape)
    if shift is None or zeros is None:
        return shift
    known = zeros[~lost]
    alike = len(known) > 0 and _are_equal(known)
    return torch.where(groups.spread(lost), -known[0] * unit, shift) if alike else shift


def _are_equal(zeros: Tensor) -> bool:
    return float(zeros.max() - zeros.min()) < MAX_ZERO_DIFFERENCE


def _lose_nothing(levels: Levels, needed: Tensor) -> bool:
    """Return whether codes are floats, and scales such that few values are subnormal and none is out of range."""
    if not levels.mantissa:
        return False
    min_multiple = MIN_NORMAL_MULTIPLE * levels.normal / levels.highest
    return bool(((needed >= min_multiple) & (needed <= 1)).all())


def _find_share_used(levels: Levels, needed: Tensor, live: Tensor) -> float:
    """Return the used share of the code range of files that hold codes of fewer bits in whole bytes; otherwise 1.

    In such files, the scale of each group is its largest value divided by the largest code of fewer bits, or by half a
    step more.
    """
    if levels.table or levels.mantissa or levels.number <= CODES_OF_BYTE // 2 or not bool(live.any()):
        return 1.0
    needed = needed[live]
    median = float(needed.median())
    for bits in (1, 2, 3):  # plus a sign
        for code in (2.0**bits - 1, 2.0**bits - 0.5):
            if abs(median * levels.highest / code - 1) < MAX_SCALE_DIFFERENCE:
                far = (needed * levels.highest / code - 1).abs() >= MAX_SCALE_DIFFERENCE
                if not bool(far.any()):
                    return code / levels.highest
    return 1.0


def _estimate_whole(needed: Tensor, unit: Tensor, levels: Levels, largest: float | None) -> Tensor:
    """Estimate ``needed`` of incomplete groups from the weight's largest value, or allowing for a larger one."""
    if largest is not None:
        return torch.full_like(needed, largest / abs(float(unit.reshape(-1)[0])) / levels.highest)
    return torch.maximum(needed, torch.minimum(needed * MAX_PART_RATIO, torch.ones_like(needed)))


def _round_to_powers(levels: Levels, needed: Tensor) -> list[Tensor]:
    """Round scales to powers of two in two ways: to the smallest that clip nothing, and as OCP's MX formats do."""
    largest = levels.highest if levels.highest > 0 else -levels.lowest  # signed codes of one bit are -1 and 0
    mantissa, exponent = needed.frexp()
    of_largest = (needed * largest).frexp().exponent - frexp(largest)[1]
    return [_make_power(exponent - (mantissa == 0.5).int()), _make_power(of_largest)]


def _make_power(exponent: Tensor) -> Tensor:
    """Return exactly 2^``exponent``, float32, for int32 exponents."""
    return (exponent.clamp(-126, 127) + 127 << FLOAT32_MANTISSA).view(torch.float32)


def list_multiples(levels: Levels) -> Sequence[float]:
    """Return the multiples of the scale that clips nothing which are tried; codes of many bits have only one."""
    return SEARCHED_MULTIPLES if levels.number <= MAX_SEARCHED_LEVELS else (1.0,)


def _are_powers_of_two(unit: Tensor) -> bool:
    return bool((unit.float().frexp().mantissa.abs() == 0.5).all())


def find_groups(block: tuple[int, int], unit: Tensor) -> ScaleGroups | None:
    """Return the groups of ``block`` (rows, cols) elements that share a unit, apart from factors of columns.

    The result is None if the units, (r, c), do not form these blocks.
    """
    rows, cols = unit.shape
    if rows % block[0] or cols % block[1]:
        return None
    groups, size = ScaleGroups(*block), unit.abs()
    ratios = (size / groups.spread(groups.max(size))).nan_to_num_(1.0).masked_fill_(size == 0, 1.0)
    return groups if bool(((ratios - ratios[:1]).abs() <= MAX_UNIT_DIFFERENCE * ratios[:1]).all()) else None


def order_columns(width: int, unit: Tensor) -> Tensor | None:
    """Return an order of columns, (c,), in which columns of the same group are neighbours; None if there is none.

    A group is ``width`` columns anywhere, the same in all rows of ``unit``, (r, c).
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(unit), generator=generator).to(unit.device)
    order = (weights @ unit).argsort(stable=True)
    return order if find_groups((1, width), unit[:, order]) else None
