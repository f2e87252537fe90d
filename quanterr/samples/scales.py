"""The loss of a weight's stored scales against good ones: sums over sampled groups, and groups that stand out."""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.formats import Weight
from quanterr.kernel.interpreter import decoder_of
from quanterr.kernel.levels import SUBNORMAL, Levels, ScaleSteps, Scaling
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import Attainable, BadRegion, Kind, level
from quanterr.samples.conspicuous_rows import spans_rows
from quanterr.samples.good_scales import (
    Losses,
    ScaleGroups,
    find_groups,
    has_one_zero,
    measure_losses,
    measure_part_losses,
    order_columns,
)

PART = 64  # columns in a part of a group
GROUP_DB = 5.0  # loss of a group's scale from which the group stands out
ZERO_DB = 1.0  # the same for a scale of zero: codes with three values reach only 2 dB on normal numbers
FAR = 3.0  # ratio of errors, below GROUP_DB: a group with a smaller one stands out only if its scale is zero
WIDE, NARROW = 2.2, 0.7  # range of stored / good scale that searches choose (and round to a step): never wrong
CLIPPED_DB = 12.0  # loss from which clipping is wrong: no search accepts it for smaller steps elsewhere in the group
# Number of levels → largest good / stored scale that is not wrong. With 8 bits no clipping pays off, and only the
# rounding of zero points makes a scale too small; with 5 and 6 bits, llama.cpp's search clips 0.9 of 31 or 32 steps.
BYTE = 200  # fewest levels of a code of 8 bits
CLIPPED = {BYTE: 1.05, 32: 1.12, 0: 1 / NARROW}
# Elements of a group that loses little although it clips a value that matters in its row. A smaller group loses much.
# In a larger group of integers, a search for the least error clips such values.
FEWEST_CLIPPED, MOST_CLIPPED = 1 << 10, 1 << 17
WORSE = 1.01  # ratio of losses from which a search has not chosen to clip
# Shares of the worst error, half a step per element. An error below means that values coincide with codes. Rounding
# leaves a third of the worst error, and less with few levels, or with floats, whose steps differ.
LUCKY, LUCKY_FINE = 0.08, 0.2
MANY = 16  # levels from which LUCKY_FINE applies
UNDERFLOW = 2.0  # a scale below this multiple of the least scale loses noticeably by rounding
ALIKE = 0.01  # units with a smaller relative difference count as one scale
FEWEST = 8  # smaller groups, in elements, are not judged
FLOOR = 1e-6  # an error below this share of a group's energy does no damage
ENOUGH, EVERY = 1 << 14, 4  # in samples of more elements, one of EVERY rows is used
AT_ONCE = 1 << 17  # elements of rows processed together, as small operations cost more than their arithmetic
MOST_PARTS = 64  # most groups that are listed


class _SampledGroups(NamedTuple):
    """The losses of the groups in a few rows."""

    losses: Losses
    rows: Sequence[int]  # first row of each row of groups
    cols: Sequence[int]  # first column of each column of groups; -1: all columns
    size: int  # elements per group
    whole: bool = True  # whether groups are complete; parts of groups are not judged
    step: Tensor | None = None  # the step that divides the scale of each group, (groups down, groups across)


class _Rows(NamedTuple):
    """Sampled rows, each with its own scales, that are collected to be processed together."""

    numbers: list[int]
    col: int
    x: Tensor
    e: Tensor | None
    scales: Scaling
    y: Tensor | None

    @classmethod
    def thin_out(
        cls, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling, y: Tensor | None
    ) -> "_Rows":
        """Copy one in :data:`EVERY` rows; a copy is needed as the buffers are reused."""
        e, y, shift = (None if side is None else _thin_out(side) for side in (e, y, scales.shift))
        return cls(list(rows[::EVERY]), col, _thin_out(x), e, Scaling(_thin_out(scales.unit), shift), y)

    @property
    def are_apart(self) -> bool:
        """True if each row has its own scales."""
        return all(side is None or side.shape[0] == len(self.x) for side in self.scales)

    def is_like(self, other: "_Rows") -> bool:
        """Return whether two sets of rows can be processed together."""
        return self._kind == other._kind

    @property
    def _kind(self) -> tuple[object, ...]:
        sides = (self.x, self.e, self.y, *self.scales)
        return self.col, *(None if side is None else side.shape[1] for side in sides)


class ScaleSampler:
    """An accumulator of sampled chunks that sums up the loss of their scales."""

    def __init__(
        self,
        weight: Weight,
        largest: float | None,
        least: Callable[[int], Tensor | None] | None = None,
        runs: Tensor | None = None,
    ) -> None:
        """Start empty.

        ``largest`` is the original's largest magnitude, and ``runs`` the largest in each run of groups. ``least`` maps
        a row to the factors, (1, c), that its codes would have with the least scale, or None if unknown.
        """
        self._weight, self._largest, self._find_least, self._runs = weight, largest, least, runs
        self._waiting: list[_Rows] = []
        self._sampled: list[_SampledGroups] = []
        self._within: list[_SampledGroups] = []  # parts of groups
        self.one_zero: bool | None = None  # whether all groups share a zero point; None if unknown
        self._is_stacked = False  # whether several weights with one scale each are stacked
        self._n_scales = None if weight.scale is None else weight.scale.n
        self._has_one_scale = self._n_scales == 1 and not weight.rotated
        self.has_row_scales = not (spans_rows(weight) or self._has_one_scale)
        # Small floats lose precision if the scale is too large.
        self.has_floats, self._lucky = bool(weight.levels and weight.levels.mantissa), get_lucky_share(weight.levels)

    def make_companion(self) -> "ScaleSampler":
        """Return a sampler for further groups of the weight, which knows already whether zero points differ."""
        self._take_waiting()
        found = ScaleSampler(self._weight, self._largest, self._find_least, self._runs)
        found.one_zero, found._is_stacked = self.one_zero, self._is_stacked
        return found

    def add(
        self,
        rows: Sequence[int],
        col: int,
        x: Tensor,
        e: Tensor | None,
        scales: Scaling,
        y: Tensor | None = None,
        at_once: int | None = None,
    ) -> None:
        """Add rows from column ``col`` on, (r, c).

        ``e`` is the error of the nearest codes, if known; ``y`` are the stored values, unless they are the nearest.
        If the rows are from several chunks, ``at_once`` is the number of elements in each.
        """
        if self._weight.levels is None or self._weight.encoding == "cast":
            return
        if (at_once or x.numel()) <= ENOUGH or not (self.has_row_scales or self._has_one_scale):
            if not self._take(rows, col, x, e, scales, y) and at_once is not None and at_once < x.numel():
                self._take_each(at_once // x.shape[1], _Rows(list(rows), col, x, e, scales, y))
            return
        found = _Rows.thin_out(rows, col, x, e, scales, y)
        if not found.are_apart:
            self._take(*found)
            return
        if self._waiting and not found.is_like(self._waiting[0]):
            self._take_waiting()
        self._waiting.append(found)
        if sum(one.x.numel() for one in self._waiting) >= AT_ONCE:
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Process the collected rows together."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        numbers = [number for one in waiting for number in one.numbers]
        x, unit = (torch.cat(sides) for sides in zip(*((one.x, one.scales.unit) for one in waiting), strict=True))
        optional = zip(*((one.e, one.y, one.scales.shift) for one in waiting), strict=True)
        stored = ([side for side in sides if side is not None] for sides in optional)
        e, y, shift = (torch.cat(sides) if sides else None for sides in stored)
        self._take(numbers, waiting[0].col, x, e, Scaling(unit, shift), y)

    def _take_each(self, height: int, of: _Rows) -> None:
        """Take each ``height`` rows on their own: if a sum of some is not finite, the others are still sampled."""
        unit = of.scales.unit
        for first in range(0, len(of.numbers), height):
            own = slice(first, first + height)
            e, y, shift = (
                side if side is None or len(side) == 1 else side[own] for side in (of.e, of.y, of.scales.shift)
            )
            scales = Scaling(unit if len(unit) == 1 else unit[own], shift)
            self._take(of.numbers[own], of.col, of.x[own], e, scales, y)

    def _take(
        self, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling, y: Tensor | None
    ) -> bool:
        """Sum up the losses of rows; return False, leaving them out, if a sum is not finite."""
        if self._weight.levels is None:
            return True
        groups, order = self._find_groups(scales, tuple(x.shape))
        if groups is None:
            return True
        cols = x.shape[1] // groups.cols * groups.cols
        if order is not None or cols < x.shape[1]:
            chosen = slice(cols) if order is None else order
            x, scales = x[:, chosen], _take_columns(scales, chosen)
            e, y = (None if side is None else side[:, chosen] for side in (e, y))
        largest = None if groups.whole or not _is_one(scales.unit) else self._find_largest(rows)
        if self.one_zero is None:
            self.one_zero = has_one_zero(self._weight.levels, scales, groups, x.shape)
        found = measure_losses(self._weight.levels, x, e, scales, groups, largest, y, self.one_zero)
        if not bool(torch.cat([numbers.flatten() for numbers in found]).isfinite().all()):
            return False
        step = self._find_step(found, rows, col // groups.cols)
        if step is not None:
            found = self._accept_near_scales(found, step, col // groups.cols)
        places: Sequence[int] = range(col, col + cols, groups.cols)
        if order is not None or (groups.rows == 1 and len(places) == 1):
            places = [-1]
        if groups.whole or largest is not None:
            self._add_parts(rows, col, x, scales, groups, found)
        self._sampled.append(
            _SampledGroups(found, rows[:: groups.rows], places, groups.rows * groups.cols, groups.whole, step)
        )
        return True

    def _add_parts(
        self, rows: Sequence[int], col: int, x: Tensor, scales: Scaling, groups: ScaleGroups, found: Losses
    ) -> None:
        """Add parts of groups of float codes whose scales are far too large, where parts with small values lose."""
        levels, cols = self._weight.levels, x.shape[1]
        if not self.has_floats or scales.shift is not None or not levels or groups.cols % PART:
            return
        if bool((found.needed < 1 / WIDE).any()):
            parts = measure_part_losses(levels, x, scales.unit, found, groups, PART)
            self._within.append(_SampledGroups(parts, rows, range(col, col + cols, PART), PART))

    def _find_largest(self, rows: Sequence[int]) -> float | None:
        """Return the largest magnitude in the group of these rows; None if unknown, or if they are in two groups."""
        if self._has_one_scale:
            return self._largest
        if self._runs is None or not self._weight.matrix_rows:
            return None
        experts = {row // self._weight.matrix_rows for row in rows}
        return float(self._runs[experts.pop()]) if len(experts) == 1 else None

    def _find_step(self, found: Losses, rows: Sequence[int], first: int) -> Tensor | None:
        """Return the step that divides each group's scale; None if scales are not multiples of a step.

        ``first`` is the index of the first group in its row.
        """
        steps = self._weight.scale_steps
        if steps is None:
            return None
        if steps.of_largest and self._runs is not None:
            groups = range(first, first + found.good.shape[1])
            return find_run_steps(self._weight, self._runs, rows, groups).to(found.good.device, torch.float64)
        if steps.of_largest:
            return torch.full_like(found.good, steps.of_largest * float(found.good.max()))
        return _compute_step(found.good, steps.scales, steps, first)

    def _accept_near_scales(self, found: Losses, step: Tensor, first: int) -> Losses:
        """Count stored scales within one step of a good one as good; ``first`` as in :meth:`_find_step`."""
        steps = self._weight.scale_steps
        near = (found.stored - found.good).abs() <= step
        if steps and steps.minima:
            near &= found.moved <= _compute_step(found.lowest, steps.minima, steps, first)
        return found._replace(good_sq=torch.where(near, torch.maximum(found.good_sq, found.stored_sq), found.good_sq))

    @cached_property
    def _order(self) -> Tensor | None:
        """The order in which the columns of each group are next to each other, (c,).

        None if none is stored, or groups differ in size.
        """
        decoder, block = decoder_of(self._weight.dequantize), self._weight.block_size
        if decoder is None or decoder.columns is None or block is None:
            return None
        groups = torch.frombuffer(bytearray(decoder.columns.read()), dtype=torch.int32).long()
        return groups.argsort(stable=True) if bool((groups.bincount() == block[1]).all()) else None

    def _find_groups(self, scales: Scaling, shape: tuple[int, ...]) -> tuple[ScaleGroups | None, Tensor | None]:
        """Return how sampled elements share scales, and the column order that makes groups contiguous, if needed."""
        weight, unit = self._weight, scales.unit
        rows, cols = weight.matrix
        if weight.block_size:
            block = weight.block_size
            units = unit.expand(-1, shape[1])[:, : shape[1] // block[1] * block[1]]
            if not units.numel() or shape[0] % block[0]:
                return None, None
            if self._order is not None:
                fits = len(self._order) == units.shape[1]
                return (ScaleGroups(*block), self._order.to(unit.device)) if fits else (None, None)
            if find_groups((1 if len(units) == 1 else block[0], block[1]), units):
                return ScaleGroups(*block), None
            order = order_columns(block[1], units) if block[0] == 1 else None
            return (ScaleGroups(*block), order) if order is not None else (None, None)
        of_rows = unit.shape[0] == shape[0] if self._n_scales is None else self._n_scales >= rows
        if unit.shape[1] > 1 and find_groups((1, shape[1]), unit) is None:
            return None, None
        if weight.scale is None and len(unit) > 1 and bool((unit == unit[:1]).all()):
            self._is_stacked = True
        if self._is_stacked:  # the last row of each weight is unknown
            return None, None
        if of_rows:
            return ScaleGroups(1, shape[1], shape[1] == cols), None
        whole = shape == (rows, cols)
        return ScaleGroups(shape[0], shape[1], whole) if self._has_one_scale else ScaleGroups(1, shape[1], False), None

    def result(self, found: Attainable, beside: "ScaleSampler | None") -> Attainable:
        """Add the loss of scales to ``found``, the result for codes; ``beside`` samples further conspicuous groups."""
        samplers = [sampler for sampler in (self, beside) if sampler]
        for sampler in samplers:
            sampler._take_waiting()
        every = [one for sampler in samplers for one in (*sampler._sampled, *sampler._within)]
        parts = self._find_regions(every)
        found = replace(found, parts=(*found.parts, *parts))
        if not self._sampled:
            return found
        stored = sum(float(one.losses.stored_sq.sum()) for one in self._sampled)
        ways = (0, -1) if any(len(one.losses.good_sq) > 1 for one in self._sampled) else (0,)
        good = max(sum(float(one.losses.good_sq[way].sum()) for one in self._sampled) for way in ways)
        worst = sum(float(one.losses.worst_sq.sum()) for one in self._sampled)
        x_sq = sum(float(one.losses.x_sq.sum()) for one in self._sampled)
        ratios = torch.cat([(one.losses.stored / one.losses.good)[one.losses.x_sq > 0] for one in self._sampled])
        ratio = float(ratios.median()) if len(ratios) else 1.0
        return add_loss(found, GroupSums(x_sq, stored, good, worst), ratio, self._lucky)

    def _find_regions(self, sampled: Sequence[_SampledGroups]) -> tuple[BadRegion, ...]:
        """Find groups with scales far worse than good ones; kind is underflow if good scales are too small to store."""
        found: dict[Kind, dict[tuple[int, int], _BadGroup]] = {"group": {}, "underflow": {}}
        most = get_clipping_limit(self._weight.levels)
        for one in sampled:
            stored, good = one.losses.stored, one.losses.good
            half = 0.0 if one.step is None else one.step / 2  # rounding may move a chosen scale by this much
            zero = stored == 0
            far = zero | (one.losses.stored_sq > FAR * one.losses.good_sq.amax(0))
            clips_bytes = self._clips_bytes(one)
            if not one.whole or one.size < FEWEST or not bool((far | clips_bytes).any()):
                continue
            lost = 10 * (one.losses.stored_sq / _get_good_sq(one.losses, self._lucky)).log10()
            clips = one.losses.needed > 1
            fits = (one.losses.used * stored > (stored - half) / WIDE) & (good < most * (stored + half))
            fits &= (lost < CLIPPED_DB) | ~clips
            out = torch.where(zero, (lost > ZERO_DB) & (good >= half / NARROW), (lost > GROUP_DB) & ~fits)
            out = (out | clips_bytes) & (one.losses.stored_sq > FLOOR * one.losses.x_sq)
            for down, across in out.nonzero().tolist():
                place = one.rows[down], one.cols[across] if across < len(one.cols) else -1
                group = _BadGroup(float(lost[down, across]), place, one.size, one.losses, (down, across))
                step = self._find_least_scale(group)
                if group.good < UNDERFLOW * step and group.stored < UNDERFLOW * step:
                    found["underflow"][place] = group
                elif abs(group.stored - group.good) > step:
                    found["group"][place] = group
        return tuple(_make_region(kind, list(groups.values()), self._lucky) for kind, groups in found.items() if groups)

    def _clips_bytes(self, one: _SampledGroups) -> Tensor:
        """Return which groups of 8-bit codes clip their largest value, which their row then loses."""
        levels = self._weight.levels
        is_byte = levels is not None and levels.number >= BYTE and one.size >= FEWEST_CLIPPED
        if not is_byte or (one.size > MOST_CLIPPED and levels and not levels.mantissa):
            return torch.zeros_like(one.losses.needed, dtype=torch.bool)
        half = 0.0 if one.step is None else one.step / 2
        clips = (one.losses.good > CLIPPED[BYTE] * (one.losses.stored + half)) & (one.losses.stored > 0)
        if not bool(clips.any()):
            return clips
        if bool((one.losses.stored.frexp().mantissa == 0.5).all()):  # OCP's rule for exponents clips an eighth
            return torch.zeros_like(clips)
        return clips & (one.losses.stored_sq > WORSE * one.losses.good_sq.amax(0))

    @cached_property
    def _least(self) -> Callable[[int], Tensor | None]:
        return cache(self._find_least or (lambda row: None))

    def _find_least_scale(self, group: "_BadGroup") -> float:
        """Return the least scale that a group can have, which divides all small scales; 0 if unknown."""
        if self._weight.scales_are_float16:
            return SUBNORMAL
        row, col = group.place
        least = self._least(row) if col >= 0 else None
        return 0.0 if least is None else float(least[0, min(col, least.shape[1] - 1)])


def has_row_scales(weight: Weight) -> bool:
    """Return whether each row of a weight has its own scales."""
    has_one_scale = weight.scale is not None and weight.scale.n == 1 and not weight.rotated
    return not (spans_rows(weight) or has_one_scale)


def find_run_steps(weight: Weight, runs: Tensor, rows: Sequence[int], groups: range) -> Tensor:
    """Return the step that divides the scale of each of a few groups in each of ``rows``, (rows, groups) float32.

    ``runs`` holds the original's largest magnitude in each run of groups.
    """
    steps, block = weight.scale_steps, weight.block_size
    assert steps is not None and block is not None  # noqa: S101, PT018
    across = weight.matrix[1] // block[1]
    places = torch.tensor(rows)[:, None] * across + torch.tensor(groups)
    return runs[places // steps.shared] * steps.of_largest


class GroupSums(NamedTuple):
    """Energies summed over groups: of the original, and of the errors with stored, good and the worst scales."""

    x_sq: float
    stored_sq: float
    good_sq: float
    worst_sq: float


def add_loss(found: Attainable, sums: GroupSums, ratio: float, lucky: float) -> Attainable:
    """Add the loss of scales to the result for codes; ``ratio`` is the median of stored / good scale."""
    x_sq, stored_sq, good_sq, worst_sq = sums
    if good_sq < lucky * worst_sq:
        good_sq = max(good_sq, min(stored_sq, worst_sq))
    # No error is larger than with scales of zero.
    return replace(found, stored_sq=stored_sq, good_sq=min(good_sq, x_sq), scale_ratio=ratio)


def get_lucky_share(levels: Levels | None) -> float:
    """Return the share of the worst error below which a good scale's error is small by accident."""
    return LUCKY_FINE if levels and not levels.mantissa and levels.number >= MANY else LUCKY


def get_clipping_limit(levels: Levels | None) -> float:
    """Return the largest good / stored scale that is not wrong."""
    number = levels.number if levels else 0
    return next(most for least, most in CLIPPED.items() if number >= least)


class _BadGroup(NamedTuple):
    """A group whose scale stands out."""

    lost_db: float
    place: tuple[int, int]
    size: int
    of: Losses
    at: tuple[int, int]

    @property
    def good(self) -> float:
        """The good scale of the group."""
        return float(self.of.good[self.at])

    @property
    def stored(self) -> float:
        """The stored scale of the group."""
        return float(self.of.stored[self.at])


def _make_region(kind: Kind, groups: list[_BadGroup], lucky: float) -> BadRegion:
    groups.sort(key=lambda group: (group.stored != 0, -group.lost_db, group.place))
    _, worst, size, of, at = groups[0]
    x_sq, stored_sq, good_sq, stored, good = (
        float(numbers[at]) for numbers in (of.x_sq, of.stored_sq, _get_good_sq(of, lucky), of.stored, of.good)
    )
    return BadRegion(
        kind,
        len(groups),
        size,
        tuple(sorted(group.place for group in groups[:MOST_PARTS])),
        worst,
        level(x_sq, stored_sq),
        level(x_sq, good_sq),
        stored / good if good else inf,
    )


def _get_good_sq(found: Losses, lucky: float) -> Tensor:
    """Return each group's error with good scales, by the worse rule.

    An error that is small only by luck is replaced by the worst possible one.
    """
    good_sq = found.good_sq.amax(0)
    return torch.where(good_sq < lucky * found.worst_sq, found.worst_sq, good_sq)


def _compute_step(sizes: Tensor, number: int, steps: ScaleSteps, first: int) -> Tensor:
    """Return the step that divides the scales, or minima, of groups (down, across).

    The step is stored as float16: if it is subnormal, its rounding error counts ``number`` times.
    """
    before = first % steps.shared
    padded = torch.nn.functional.pad(sizes, (before, -(before + sizes.shape[1]) % steps.shared))
    most = padded.view(len(sizes), -1, steps.shared).amax(2).repeat_interleave(steps.shared, 1)
    return most[:, before : before + sizes.shape[1]] / number + number * SUBNORMAL


def _is_one(unit: Tensor) -> bool:
    """Return whether all codes have the same factor; undone smoothing factors differ by row and column."""
    return bool(unit.amax() - unit.amin() <= ALIKE * unit.abs().amax())


def _thin_out(side: Tensor) -> Tensor:
    """Copy one in :data:`EVERY` rows of (1 or r, c); a single row is copied as it is."""
    return (side if side.shape[0] == 1 else side[::EVERY]).clone()


def _take_columns(scales: Scaling, which: Tensor | slice) -> Scaling:
    unit, shift = (side if side is None or side.shape[1] == 1 else side[:, which] for side in scales)
    assert unit is not None  # noqa: S101
    return Scaling(unit, shift)
