"""How good the scales of a weight are: what its groups lose with the stored ones, and would lose with good ones.

Good scales are made of the original, for the groups that the format has: as large as the largest code needs, with zero
points as large as the range needs. They are rounded to powers of two where the stored ones are. All is counted in
stored codes, so that factors of columns, branches of low rank and rotations count as the format applies them: a good
scale is the stored one times a number for each group.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.tensors.levels import Levels, Scaling

SAME = 0.05  # of a unit: columns of a group whose units differ by more, and not alike in all rows, are not one
ZERO = 1e-6  # of the largest level: a shift that is none
MOVED = 0.01  # of a code: by more a zero point differs within a group, as only a branch makes it
FIXED = 0.05  # of a code: by less the zero points of all groups differ, so the format, or the file, has but one
ALIKE = 0.01  # relative
BYTE = 256  # codes
ABOVE_NORMAL = 64.0  # times the least normal number: values that are so large round as floats do
SOME = 1.2  # times what good scales lose: less is none
FEW_LEVELS = 16  # of fewer, scales are sought: more lose little by one that clips nothing
SEARCHED = (1.0, 0.7, 0.775, 0.85, 0.925, 1.075, 1.15, 1.225, 1.3)
PARTLY = 4.0  # by so much the largest value of a group may be above that of a part of it


class Groups(NamedTuple):
    """How the elements of a matrix share scales: blocks of (rows, cols), of which it has whole numbers."""

    rows: int
    cols: int
    whole: bool = True  # each group is all there

    def most(self, values: Tensor) -> Tensor:
        """The largest of each group, (groups down, groups across)."""
        return self._split(values).amax(3).amax(1)

    def most_of_units(self, unit: Tensor, shape: torch.Size) -> Tensor:
        """The same of numbers that rows, or columns, of a matrix have in common, (1 or r, 1 or c)."""
        if unit.shape[1] > 1:
            return self.most(unit.expand(shape))
        down, across = shape[0] // self.rows, shape[1] // self.cols
        return unit.expand(shape[0], 1).reshape(down, self.rows).amax(1, keepdim=True).expand(down, across)

    def least(self, values: Tensor) -> Tensor:
        """The smallest of each group."""
        return self._split(values).amin(3).amin(1)

    def total(self, values: Tensor) -> Tensor:
        """The sum of each group, float64."""
        return self._split(values).sum(3).sum(1, dtype=torch.float64)

    def spread(self, of_groups: Tensor) -> Tensor:
        """A number of each group for its elements, a view of (r, c) where that needs no copy."""
        if self.rows == 1 and of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.rows, 0).repeat_interleave(self.cols, 1)

    def _split(self, values: Tensor) -> Tensor:
        rows, cols = values.shape
        return values.reshape(rows // self.rows, self.rows, cols // self.cols, self.cols)


class Losses(NamedTuple):
    """Of groups, (groups down, groups across) float64 each."""

    x_sq: Tensor
    stored_sq: Tensor  # what the nearest codes lose with the stored scales
    good_sq: Tensor  # and with good ones; (2, …): as two rules make them, where they are powers of two
    worst_sq: Tensor  # and at worst: half a step, of all elements but zeros
    needed: Tensor  # a good scale / the stored one
    used: Tensor  # the same for what the stored codes stand for: which part of their range these use
    stored: Tensor  # the stored scale, and a good one, as what codes are multiplied by
    good: Tensor
    moved: Tensor  # how far the lowest level is from where a good one would be, and
    lowest: Tensor  # where that is


def losses(
    levels: Levels,
    x: Tensor,
    e: Tensor | None,
    scales: Scaling,
    groups: Groups,
    largest: float | None = None,
    y: Tensor | None = None,
    one_zero: bool | None = None,
) -> Losses:
    """Of ``x``, (r, c) float32; ``e``, where it is known, is the error of the nearest codes with the stored ``scales``.

    ``largest`` is the largest magnitude of the original, where a group is all of the weight and ``x`` a part of it.
    ``y`` is what is stored, where its codes are not the nearest. ``one_zero``: whether all groups of the weight have
    one zero point; None: as these groups show it.
    """
    unit, shift = scales
    none, stored = unit == 0, groups.most_of_units(unit.abs(), x.shape)
    lost = groups.least(none.float().expand(x.shape)) > 0 if bool(none.any()) else None
    if lost is not None:
        x, e = _without_codes(x, none, groups), None
        unit = unit.masked_fill(none, 1.0)
    codes = (x - shift if shift is not None else x) / unit
    zeros = None if shift is None else _zeros(levels, shift, unit, groups, codes.shape)
    if one_zero is None:
        one_zero = zeros is None or _fixed(zeros)
    needed, start, first = _needed(levels, codes, zeros, groups, one_zero)
    whole = zeros is not None and not one_zero and _whole(zeros)
    used = needed
    if y is not None:
        used = _needed(levels, (y - shift if shift is not None else y) / unit, zeros, groups, one_zero)[0]
    if not groups.whole:
        needed = _of_whole(needed, unit, levels, largest)
    live = needed > 0
    needed = (needed / _share_used(levels, needed[live])).masked_fill(~live, 1.0)
    x_sq = groups.total(x.square())
    size = groups.most_of_units(unit.abs(), x.shape)
    good, moved = needed * size, (levels.lowest - start - (levels.lowest - first) * needed) * size
    lowest = moved.abs() if zeros is None else ((start + (levels.lowest - first) * needed - zeros) * size).abs()
    of_groups = [numbers.double() for numbers in (needed, used, stored, good, moved.abs(), lowest)]
    if _loses_nothing(levels, needed):
        usual_sq = x_sq / 6 / 4 ** (levels.mantissa + 1)
        none_sq = torch.zeros_like(usual_sq)
        return Losses(x_sq, usual_sq, usual_sq[None], none_sq, *of_groups)
    if e is None:
        e = (levels.values(levels.numbers(codes)) - codes).mul_(unit)
    stored_sq = groups.total(e.square())
    rounded = _rounded(levels, needed) if _powers_of_two(unit) else [needed * size for size in _sizes(levels)]
    good_sq = []
    for factor in rounded:
        sizes = groups.spread(factor)
        if whole and zeros is not None:
            start = zeros - ((zeros - start) / factor).round() * factor
        ideal = (codes - groups.spread(start)).div_(sizes).add_(groups.spread(first))
        error = (levels.values(levels.numbers(ideal)) - ideal).mul_(sizes).mul_(unit)
        good_sq.append(groups.total(error.square_()))
    if not _powers_of_two(unit):  # the best that a short search finds in each group
        good_sq = [torch.stack(good_sq).amin(0)]
    if levels.mantissa:
        worst_sq = x_sq / 4 ** (levels.mantissa + 1)
    elif not bool((stored_sq > SOME * good_sq[-1]).any()):
        worst_sq = torch.zeros_like(x_sq)
    else:
        half = levels.room(ideal) if levels.table else 0.5
        worst_sq = groups.total((groups.spread(needed) * unit * half).square() * (x != 0))
    if lost is not None:  # without a scale all is lost but what a shift gives, whatever the code
        lost_sq = x_sq if shift is None else groups.total((x - shift).square())
        stored_sq = torch.where(lost, lost_sq, stored_sq)
        good_sq = [torch.where(lost & (x_sq == 0), 0.0, one) for one in good_sq]
    return Losses(x_sq, stored_sq, torch.stack(good_sq), worst_sq, *of_groups)


def losses_of_parts(levels: Levels, x: Tensor, unit: Tensor, of_groups: Losses, groups: Groups, width: int) -> Losses:
    """Of parts of rows, ``width`` columns each, what they lose to scales of their groups that are too large.

    ``levels`` are those of floats, which lose nothing to such scales but where values are so small that their codes
    are subnormal: a group as a whole does not show it. ``unit`` is that of ``x``, (r, c).
    """
    good = of_groups.needed.float()
    if _powers_of_two(unit):
        good = _rounded(levels, good)[0]
    parts, codes, needed = Groups(1, width), x / unit, groups.spread(good).expand(x.shape)
    stored_sq, good_sq = (
        parts.total(((levels.values(levels.numbers(codes / by)) * by - codes) * unit).square())
        for by in (torch.ones_like(needed), needed)
    )
    by = parts.most(needed).double()
    stored = parts.most(unit.abs().expand(x.shape)).double()
    none_sq = torch.zeros_like(stored_sq)
    return Losses(
        parts.total(x.square()), stored_sq, good_sq[None], none_sq, by, by, stored, stored * by, none_sq, none_sq
    )


def has_one_zero(levels: Levels, scales: Scaling, groups: Groups, shape: torch.Size) -> bool | None:
    """Whether all these groups have one zero point; None where that is not known."""
    unit, shift = scales
    if shift is None or bool((unit == 0).any()):
        return None
    zeros = _zeros(levels, shift, unit, groups, shape)
    return None if zeros is None else _fixed(zeros)


def _needed(
    levels: Levels, codes: Tensor, zeros: Tensor | None, groups: Groups, one_zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """By how much the steps of each group must be larger for ``codes``, (r, c); the code where these begin, and which
    level is there: the zero point, or of zero points that differ the least code.
    """
    high, low = groups.most(codes), groups.least(codes)
    if zeros is None or one_zero:
        zero = torch.zeros_like(high) if zeros is None else zeros
        return _centred(levels, high, low, zero), zero, zero
    start = torch.minimum(low, zeros)
    needed = (torch.maximum(high, zeros) - start) / (levels.highest - levels.lowest)
    return needed, start, torch.full_like(low, levels.lowest)


def _without_codes(x: Tensor, none: Tensor, groups: Groups) -> Tensor:
    """The original with zeros where an element has no code, as in sparse weights; a group of none lost its scale."""
    none = none.expand(x.shape)
    pruned = none & (groups.spread(groups.least(none.float())) == 0)
    return x.masked_fill(pruned, 0.0)


def _zeros(levels: Levels, shift: Tensor, unit: Tensor, groups: Groups, shape: torch.Size) -> Tensor | None:
    """The code of zero of each group; None where it is that of the value zero, or no group has one."""
    zeros = (-shift / unit).expand(shape)
    limit = max(abs(levels.lowest), abs(levels.highest))
    if not bool((zeros.abs() > ZERO * limit).any()):
        return None
    high, low = groups.most(zeros), groups.least(zeros)
    return None if bool((high - low > MOVED * (1 + high.abs())).any()) else (high + low) / 2


def _whole(zeros: Tensor) -> bool:
    """Whether zero points are stored as codes."""
    return bool(((zeros - zeros.round()).abs() < MOVED).all())


def _fixed(zeros: Tensor) -> bool:
    return float(zeros.max() - zeros.min()) < FIXED


def _centred(levels: Levels, high: Tensor, low: Tensor, zero: Tensor) -> Tensor:
    """By how much codes must be larger for the values around a zero point."""
    above, below = levels.highest - zero, zero - levels.lowest
    up = torch.where(above > 0, (high - zero) / above.clamp(min=1e-30), 0.0)
    down = torch.where(below > 0, (zero - low) / below.clamp(min=1e-30), 0.0)
    return torch.maximum(up, down)


def _loses_nothing(levels: Levels, needed: Tensor) -> bool:
    """Whether codes are floats, and scales such that few values are below the least normal number, and none above."""
    if not levels.mantissa:
        return False
    least = ABOVE_NORMAL * levels.normal / levels.highest
    return bool(((needed >= least) & (needed <= 1)).all())


def _share_used(levels: Levels, needed: Tensor) -> float:
    """Which part of its range a file uses that holds codes of fewer bits in whole bytes; 1 of others.

    Its scales are the largest values over the largest code of these bits, or half a step beyond: in all groups alike.
    """
    if levels.table or levels.mantissa or levels.number <= BYTE // 2 or not needed.numel():
        return 1.0
    largest = float(needed.median()) * levels.highest
    for bits in (1, 2, 3):  # and a sign
        for code in (2.0**bits - 1, 2.0**bits - 0.5):
            if abs(largest / code - 1) < ALIKE and bool(((needed * levels.highest / code - 1).abs() < ALIKE).all()):
                return code / levels.highest
    return 1.0


def _of_whole(needed: Tensor, unit: Tensor, levels: Levels, largest: float | None) -> Tensor:
    """Of groups that are not all there: from the largest value of the weight; else as if it might be larger yet."""
    if largest is not None:
        return torch.full_like(needed, largest / abs(float(unit.reshape(-1)[0])) / levels.highest)
    return torch.maximum(needed, torch.minimum(needed * PARTLY, torch.ones_like(needed)))


def _rounded(levels: Levels, needed: Tensor) -> list[Tensor]:
    """Scales as powers of two: the least that clip nothing; and by the rule of OCP, from exponents alone."""
    largest = levels.highest if levels.highest > 0 else -levels.lowest  # signed codes of one bit are -1 and 0
    exponent = (needed * largest).log2().floor() - log2(largest) // 1
    return [2.0 ** needed.log2().ceil(), 2.0**exponent]


def _sizes(levels: Levels) -> Sequence[float]:
    """Which multiples of the scale that clips nothing are tried: of codes of few bits some smaller and larger ones."""
    return SEARCHED if levels.number <= FEW_LEVELS else (1.0,)


def _powers_of_two(unit: Tensor) -> bool:
    return bool((unit.float().frexp().mantissa.abs() == 0.5).all())


def groups_of(block: tuple[int, int], unit: Tensor) -> Groups | None:
    """Blocks of rows and columns whose elements have one unit, but for factors of columns that all rows share.

    None where the units, (r, c), are not in such blocks.
    """
    rows, cols = unit.shape
    if rows % block[0] or cols % block[1]:
        return None
    groups, size = Groups(*block), unit.abs()
    ratios = (size / groups.spread(groups.most(size))).nan_to_num_(1.0).masked_fill_(size == 0, 1.0)
    return groups if bool(((ratios - ratios[:1]).abs() <= SAME * ratios[:1]).all()) else None


def in_order(width: int, unit: Tensor) -> Tensor | None:
    """The order of columns, (c,), that brings those of one group beside each other; None where there is none.

    Groups are of ``width`` columns, which may be anywhere, but are the same in all rows of ``unit``, (r, c).
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(unit), generator=generator).to(unit.device)
    order = (weights @ unit).argsort(stable=True)
    return order if groups_of((1, width), unit[:, order]) else None
