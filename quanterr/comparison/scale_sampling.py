"""What the stored scales of a weight lose beside good ones: sums over sampled groups, and the groups that stand out."""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.comparison.conspicuous import spread_over_rows
from quanterr.formats import Weight
from quanterr.metrics.attainable import Attainable, Kind, Part, level
from quanterr.tensors.good_scales import (
    Losses,
    ScaleGroups,
    find_groups,
    has_one_zero,
    measure_losses,
    measure_part_losses,
    order_columns,
)
from quanterr.tensors.levels import SUBNORMAL, ScaleSteps, Scaling

PART = 64  # columns of a part of a group
PART_DB = 5.0  # that the scale of a group loses: it stands out
WIDE, NARROW = 2.2, 0.7  # stored / good scale: between these no scale is wrong, as searches and roundings choose them
CLIPPED_DB = 12.0  # that no search pays for smaller steps in the rest of a group
# Good scale / stored one, at most, by the number of levels: none of 8 bits gains by clipping, and a scale is too small
# by what the rounding of zero points explains; of 6 bits llama.cpp's search leaves out 0.9 of 32 steps.
CLIPPED = {200: 1.05, 64: 1.12, 0: 1 / NARROW}
# Of the worst error, half a step of each: below it values are few, and codes exact. Rounding leaves a third of it, of
# few levels and of floats, whose steps differ, less.
LUCKY, LUCKY_FINE = 0.08, 0.2
MANY = 16  # levels
UNDERFLOW = 2.0  # times the least scale: below it to round a scale costs what stands out
ALIKE = 0.01  # relative: units that differ by less are one scale
FEWEST = 8  # elements of a group that is judged
FLOOR = 1e-6  # of the energy of a group: an error below it is no damage
ENOUGH, EVERY = 1 << 14, 4  # elements of a sample: of more every fourth row is enough
AT_ONCE = 1 << 17  # elements of such rows: of a few the operations cost more than the arithmetic
MOST_PARTS = 64  # places that are kept


class _Sampled(NamedTuple):
    """Groups of a few rows."""

    losses: Losses
    rows: Sequence[int]  # the first of each
    cols: Sequence[int]
    size: int  # elements of each
    whole: bool = True  # all of each group is there: of a part of one nothing says that it is worse than others


class _Rows(NamedTuple):
    """Sampled rows that are looked at with others, each with scales of its own."""

    numbers: list[int]
    col: int
    x: Tensor
    e: Tensor | None
    scales: Scaling
    y: Tensor | None

    @classmethod
    def every_few(
        cls, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling, y: Tensor | None
    ) -> "_Rows":
        """Copies of every so many of them: buffers are filled again."""
        e, y, shift = (None if side is None else _every_few(side) for side in (e, y, scales.shift))
        return cls(list(rows[::EVERY]), col, _every_few(x), e, Scaling(_every_few(scales.unit), shift), y)

    @property
    def are_apart(self) -> bool:
        """Whether none of them shares anything with the others."""
        return all(side is None or side.shape[0] == len(self.x) for side in self.scales)

    def is_like(self, other: "_Rows") -> bool:
        """Whether they can be looked at together."""
        return self._kind == other._kind

    @property
    def _kind(self) -> tuple[object, ...]:
        sides = (self.x, self.e, self.y, *self.scales)
        return self.col, *(None if side is None else side.shape[1] for side in sides)


class ScaleSampler:
    """Takes in sampled chunks, and sums up what their scales lose."""

    def __init__(
        self,
        weight: Weight,
        largest: float | None,
        least: Callable[[int], Tensor | None] | None = None,
        runs: Tensor | None = None,
    ) -> None:
        """Start with none; ``largest`` is the largest magnitude of the original, ``runs`` that of each run of groups.

        ``least`` gives what the least scale would multiply the codes of a row by, (1, c), where that is known.
        """
        self._weight, self._largest, self._least = weight, largest, cache(least) if least else None
        self._runs = runs
        self._waiting: list[_Rows] = []
        self._sampled: list[_Sampled] = []
        self._within: list[_Sampled] = []  # parts of such groups
        self._one_zero: bool | None = None

    def beside(self) -> "ScaleSampler":
        """One for a few groups more: whether zero points differ is known of the sample."""
        self._take_waiting()
        found = ScaleSampler(self._weight, self._largest, self._least, self._runs)
        found._one_zero = self._one_zero
        return found

    def add(
        self, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling, y: Tensor | None = None
    ) -> None:
        """Take in rows from a column on, (r, c).

        ``e``, where it is known, is the error of the nearest codes; ``y`` what is stored, where these are others.
        """
        if self._weight.levels is None or self._weight.encoding == "cast":
            return
        if x.numel() <= ENOUGH or not (self.rows_apart or self._has_one_scale):
            self._take(rows, col, x, e, scales, y)
            return
        found = _Rows.every_few(rows, col, x, e, scales, y)
        if not found.are_apart:
            self._take(*found)
            return
        if self._waiting and not found.is_like(self._waiting[0]):
            self._take_waiting()
        self._waiting.append(found)
        if sum(one.x.numel() for one in self._waiting) >= AT_ONCE:
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Take in the rows that wait, together."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        numbers = [number for one in waiting for number in one.numbers]
        x, unit = (torch.cat(sides) for sides in zip(*((one.x, one.scales.unit) for one in waiting), strict=True))
        e, y, shift = (
            _below(sides) for sides in zip(*((one.e, one.y, one.scales.shift) for one in waiting), strict=True)
        )
        self._take(numbers, waiting[0].col, x, e, Scaling(unit, shift), y)

    def _take(
        self, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling, y: Tensor | None
    ) -> None:
        if self._weight.levels is None:
            return
        groups, order = self._groups(scales, tuple(x.shape))
        if groups is None:
            return
        cols = x.shape[1] // groups.cols * groups.cols
        if order is not None or cols < x.shape[1]:
            chosen = slice(cols) if order is None else order
            x, scales = x[:, chosen], _columns(scales, chosen)
            e, y = (None if side is None else side[:, chosen] for side in (e, y))
        largest = None if groups.whole or not _is_one(scales.unit) else self._largest_of(rows)
        if self._one_zero is None:
            self._one_zero = has_one_zero(self._weight.levels, scales, groups, x.shape)
        found = measure_losses(self._weight.levels, x, e, scales, groups, largest, y, self._one_zero)
        if not all(bool(numbers.isfinite().all()) for numbers in found):
            return
        found = self._as_stored(found, rows, col // groups.cols)
        places: Sequence[int] = range(col, col + cols, groups.cols)
        if order is not None or (groups.rows == 1 and len(places) == 1):
            places = [-1]
        if groups.whole or largest is not None:
            self._add_parts(rows, col, x, scales, groups, found)
        self._sampled.append(_Sampled(found, rows[:: groups.rows], places, groups.rows * groups.cols, groups.whole))

    def _add_parts(
        self, rows: Sequence[int], col: int, x: Tensor, scales: Scaling, groups: ScaleGroups, found: Losses
    ) -> None:
        """Of floats with scales that are far too large: the parts of groups whose values are small."""
        levels, cols = self._weight.levels, x.shape[1]
        if not self.has_floats or scales.shift is not None or not levels or cols % PART:
            return
        if bool((found.needed < 1 / WIDE).any()):
            parts = measure_part_losses(levels, x, scales.unit, found, groups, PART)
            self._within.append(_Sampled(parts, rows, range(col, col + cols, PART), PART))

    def _largest_of(self, rows: Sequence[int]) -> float | None:
        """The largest magnitude of the group that rows are a part of; None where it is not known, or there are two."""
        if self._has_one_scale:
            return self._largest
        if self._runs is None or not self._weight.matrix_rows:
            return None
        experts = {row // self._weight.matrix_rows for row in rows}
        return float(self._runs[experts.pop()]) if len(experts) == 1 else None

    def _as_stored(self, found: Losses, rows: Sequence[int], first: int) -> Losses:
        """Where scales are whole numbers of a step, a stored one that is within a step of a good one is as good.

        ``first`` is the number of the first group in its row.
        """
        steps = self._weight.scale_steps
        if steps is None:
            return found
        if steps.of_largest:
            step = steps.of_largest * self._largest_beside(rows, first, found.good)
        else:
            step = _step(found.good, steps.scales, steps, first)
        near = (found.stored - found.good).abs() <= step
        if steps.minima:
            near &= found.moved <= _step(found.lowest, steps.minima, steps, first)
        return found._replace(good_sq=torch.where(near, torch.maximum(found.good_sq, found.stored_sq), found.good_sq))

    def _largest_beside(self, rows: Sequence[int], first: int, like: Tensor) -> Tensor:
        """The largest magnitude in the run that each group, (down, across), is in; where it is not known, in these."""
        steps, block = self._weight.scale_steps, self._weight.block_size
        if self._runs is None or steps is None or block is None:
            return torch.full_like(like, float(like.max()))
        across = self._weight.matrix[1] // block[1]
        places = torch.tensor(rows)[:, None] * across + first + torch.arange(like.shape[1])
        return self._runs[places // steps.shared].to(like)

    @property
    def has_floats(self) -> bool:
        """Whether codes are floats, of which small ones lose to a scale that is too large for them."""
        return bool(self._weight.levels and self._weight.levels.mantissa)

    @property
    def rows_apart(self) -> bool:
        """Whether each row has scales of its own."""
        return not spread_over_rows(self._weight) and not self._has_one_scale

    @property
    def _lucky(self) -> float:
        """Below which share of the worst error one with good scales is no measure of what others would leave."""
        levels = self._weight.levels
        return LUCKY_FINE if levels and not levels.mantissa and levels.number >= MANY else LUCKY

    @property
    def _has_one_scale(self) -> bool:
        return self._weight.scale is not None and self._weight.scale.n == 1 and not self._weight.rotated

    def _groups(self, scales: Scaling, shape: tuple[int, ...]) -> tuple[ScaleGroups | None, Tensor | None]:
        """How sampled elements share scales, and the order of columns that brings groups together, if they are not."""
        weight, unit = self._weight, scales.unit
        rows, cols = weight.matrix
        if weight.block_size:
            block = weight.block_size
            units = unit.expand(-1, shape[1])[:, : shape[1] // block[1] * block[1]]
            if not units.numel() or shape[0] % block[0]:
                return None, None
            if find_groups((1 if len(units) == 1 else block[0], block[1]), units):
                return ScaleGroups(*block), None
            order = order_columns(block[1], units) if block[0] == 1 else None
            return (ScaleGroups(*block), order) if order is not None else (None, None)
        of_rows = weight.scale.n >= rows if weight.scale is not None else unit.shape[0] == shape[0]
        if unit.shape[1] > 1 and find_groups((1, shape[1]), unit) is None:
            return None, None
        if of_rows:
            return ScaleGroups(1, shape[1], shape[1] == cols), None
        whole = shape == (rows, cols)
        return ScaleGroups(shape[0], shape[1], whole) if self._has_one_scale else ScaleGroups(1, shape[1], False), None

    def result(self, found: Attainable, beside: "ScaleSampler | None") -> Attainable:
        """The sample of the codes, with what scales lose; the groups that stand out may be ``beside`` it as well."""
        samplers = [sampler for sampler in (self, beside) if sampler]
        for sampler in samplers:
            sampler._take_waiting()
        every = [one for sampler in samplers for one in (*sampler._sampled, *sampler._within)]
        parts = self._parts(every)
        found = found._replace(parts=(*found.parts, *parts))
        if not self._sampled:
            return found
        stored = sum(float(one.losses.stored_sq.sum()) for one in self._sampled)
        good = max(sum(float(one.losses.good_sq[way].sum()) for one in self._sampled) for way in (0, -1))
        worst = sum(float(one.losses.worst_sq.sum()) for one in self._sampled)
        if good < self._lucky * worst:
            good = max(good, min(stored, worst))
        good = min(good, sum(float(one.losses.x_sq.sum()) for one in self._sampled))  # what scales of zero leave
        ratios = torch.cat([(one.losses.stored / one.losses.good)[one.losses.x_sq > 0] for one in self._sampled])
        return found._replace(
            stored_sq=stored,
            good_sq=good,
            scale_ratio=float(ratios.median()) if len(ratios) else 1.0,
        )

    def _parts(self, sampled: Sequence[_Sampled]) -> tuple[Part, ...]:
        """The groups whose scales are far worse than good ones; apart those for which no scale is small enough."""
        found: dict[Kind, dict[tuple[int, int], _Group]] = {"group": {}, "underflow": {}}
        levels = self._weight.levels
        number = levels.number if levels and not levels.mantissa else 0
        most = next(most for least, most in CLIPPED.items() if number >= least)
        for one in sampled:
            lost = 10 * (one.losses.stored_sq / _good_sq(one.losses, self._lucky)).log10()
            clips = one.losses.needed > 1
            fits = (one.losses.used > 1 / WIDE) & (one.losses.needed < most) & ((lost < CLIPPED_DB) | ~clips)
            fits &= one.losses.stored != 0
            out = (lost > PART_DB) & (one.losses.stored_sq > FLOOR * one.losses.x_sq) & ~fits
            for down, across in out.nonzero().tolist() if one.whole and one.size >= FEWEST else ():
                place = one.rows[down], one.cols[across] if across < len(one.cols) else -1
                group = _Group(float(lost[down, across]), place, one.size, one.losses, (down, across))
                step = self._least_of(group)
                if group.good < UNDERFLOW * step and group.stored < UNDERFLOW * step:
                    found["underflow"][place] = group
                elif abs(group.stored - group.good) > step:
                    found["group"][place] = group
        return tuple(_part(kind, list(groups.values()), self._lucky) for kind, groups in found.items() if groups)

    def _least_of(self, group: "_Group") -> float:
        """The least scale that a group can have, of which those that are about as small are multiples; 0: not known."""
        if self._weight.scales_are_float16:
            return SUBNORMAL
        row, col = group.place
        least = self._least(row) if self._least and col >= 0 else None
        return 0.0 if least is None else float(least[0, min(col, least.shape[1] - 1)])


class _Group(NamedTuple):
    """A group that stands out."""

    lost_db: float
    place: tuple[int, int]
    size: int
    of: Losses
    at: tuple[int, int]

    @property
    def good(self) -> float:
        """Its good scale."""
        return float(self.of.good[self.at])

    @property
    def stored(self) -> float:
        """The one that it has."""
        return float(self.of.stored[self.at])


def _part(kind: Kind, groups: list[_Group], lucky: float) -> Part:
    groups.sort(key=lambda group: (-group.lost_db, group.place))
    _, worst, size, of, at = groups[0]
    x_sq, stored_sq, good_sq, stored, good = (
        float(numbers[at]) for numbers in (of.x_sq, of.stored_sq, _good_sq(of, lucky), of.stored, of.good)
    )
    return Part(
        kind,
        len(groups),
        size,
        tuple(sorted(group.place for group in groups[:MOST_PARTS])),
        worst,
        level(x_sq, stored_sq),
        level(x_sq, good_sq),
        stored / good if good else inf,
    )


def _good_sq(found: Losses, lucky: float) -> Tensor:
    """What groups lose with good scales, however these are rounded, and however near to the codes the values are."""
    good_sq = found.good_sq.amax(0)
    return torch.where(good_sq < lucky * found.worst_sq, found.worst_sq, good_sq)


def _step(sizes: Tensor, number: int, steps: ScaleSteps, first: int) -> Tensor:
    """The step of which the scales, or minima, of groups (down, across) are whole numbers.

    It is a float16: of subnormal ones ``number`` steps are as much larger or smaller as the step was rounded.
    """
    before = first % steps.shared
    padded = torch.nn.functional.pad(sizes, (before, -(before + sizes.shape[1]) % steps.shared))
    most = padded.view(len(sizes), -1, steps.shared).amax(2).repeat_interleave(steps.shared, 1)
    return most[:, before : before + sizes.shape[1]] / number + number * SUBNORMAL


def _is_one(unit: Tensor) -> bool:
    """Whether what codes are multiplied by is the same for all: factors that were undone differ by row and column."""
    return bool(unit.amax() - unit.amin() <= ALIKE * unit.abs().amax())


def _every_few(side: Tensor) -> Tensor:
    """A copy of every so many rows of (1 or r, c)."""
    return (side if side.shape[0] == 1 else side[::EVERY]).clone()


def _below(sides: Sequence[Tensor | None]) -> Tensor | None:
    """Rows one below the other; None where there are none."""
    found = [side for side in sides if side is not None]
    return torch.cat(found) if found else None


def _columns(scales: Scaling, which: Tensor | slice) -> Scaling:
    unit, shift = (side if side is None or side.shape[1] == 1 else side[:, which] for side in scales)
    assert unit is not None  # noqa: S101
    return Scaling(unit, shift)
