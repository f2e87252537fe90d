"""What a weight's stored scales lose compared with good ones: sums over sampled groups, and groups that stand out."""

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

PART_COLUMNS = 64  # number of columns in a part of a group
GROUP_DB = 5.0  # a group stands out if its scale loses more than this
ZERO_DB = 1.0  # a scale of zero stands out from this loss on: ternary codes reach only 2 dB on normal numbers
# Less than GROUP_DB, so that groups with a smaller ratio of errors are skipped unless their scale is zero.
MIN_ERROR_RATIO = 3.0
# Range of stored / good scale that searches for scales may choose, which is never reported as wrong.
MAX_SCALE_RATIO, MIN_SCALE_RATIO = 2.2, 0.7
# No search would accept a larger loss by clipping for the sake of smaller steps in the rest of the group.
CLIPPED_DB = 12.0
# Minimum number of levels → maximum of good / stored scale. With 8 bits, clipping does not pay off, and only the
# rounding of zero points makes a scale too small; with 5 and 6 bits, llama.cpp's search clips 0.9 of 31 or 32 steps.
LEVELS_OF_BYTE = 200  # codes with at least so many levels have 8 bits
CLIPPING_LIMITS = {LEVELS_OF_BYTE: 1.05, 32: 1.12, 0: 1 / MIN_SCALE_RATIO}
# Range of sizes of groups in which clipping a value that matters to its row costs the group little. Smaller groups lose
# much. In larger groups of integers, a search for the minimum error clips such values.
MIN_CLIPPING_ELEMENTS, MAX_CLIPPING_ELEMENTS = 1 << 10, 1 << 17
MIN_LOSS_RATIO = 1.01  # with a larger ratio of losses, no search has chosen to clip
# Shares of the maximum error, which is half a step for each element. If the error is smaller, values happen to coincide
# with codes: rounding leaves a third of the maximum, and less with few levels, or with floats, whose steps differ.
LUCKY_SHARE, LUCKY_SHARE_FINE = 0.08, 0.2
MIN_FINE_LEVELS = 16  # LUCKY_SHARE_FINE applies to at least so many levels
UNDERFLOW_RATIO = 2.0  # scales below this multiple of the smallest one that can be stored lose noticeably by rounding
MAX_UNIT_DIFFERENCE = 0.01  # relative: units that differ by less count as one scale
MIN_GROUP_ELEMENTS = 8  # smaller groups are not judged
NEGLIGIBLE_SHARE = 1e-6  # an error below this share of a group's energy does no harm
MAX_UNTHINNED_ELEMENTS, ROW_STEP = 1 << 14, 4  # in a larger sample, only every ROW_STEP-th row is used
# Elements of rows that are processed together, as small operations of torch cost more than their arithmetic.
BATCH_ELEMENTS = 1 << 17
MAX_LISTED_GROUPS = 64  # maximum number of listed groups


class _SampledGroups(NamedTuple):
    """The losses of the groups of a few sampled rows."""

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
        """Copy one of :data:`ROW_STEP` rows, as their buffers are reused."""
        e, y, shift = (None if side is None else _thin_out(side) for side in (e, y, scales.shift))
        return cls(list(rows[::ROW_STEP]), col, _thin_out(x), e, Scaling(_thin_out(scales.unit), shift), y)

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
    """Adds up the losses of scales over sampled chunks, and finds groups that stand out."""

    def __init__(
        self,
        weight: Weight,
        largest: float | None,
        find_smallest: Callable[[int], Tensor | None] | None = None,
        runs: Tensor | None = None,
    ) -> None:
        """Start empty.

        ``largest`` is the original's largest magnitude, and ``runs`` the largest in each run of groups.
        ``find_smallest`` maps a row to the factors, (1, c), that its codes would have with the smallest scale, or to
        None if unknown.
        """
        self._weight, self._largest, self._find_smallest, self._runs = weight, largest, find_smallest, runs
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
        """Return a sampler for further groups of the weight, with what is known about zero points."""
        self._take_waiting()
        companion = ScaleSampler(self._weight, self._largest, self._find_smallest, self._runs)
        companion.one_zero, companion._is_stacked = self.one_zero, self._is_stacked
        return companion

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
        if (at_once or x.numel()) <= MAX_UNTHINNED_ELEMENTS or not (self.has_row_scales or self._has_one_scale):
            if not self._take(rows, col, x, e, scales, y) and at_once is not None and at_once < x.numel():
                self._take_each(at_once // x.shape[1], _Rows(list(rows), col, x, e, scales, y))
            return
        thinned = _Rows.thin_out(rows, col, x, e, scales, y)
        if not thinned.are_apart:
            self._take(*thinned)
            return
        if self._waiting and not thinned.is_like(self._waiting[0]):
            self._take_waiting()
        self._waiting.append(thinned)
        if sum(collected.x.numel() for collected in self._waiting) >= BATCH_ELEMENTS:
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Process the collected rows together."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        numbers = [number for collected in waiting for number in collected.numbers]
        x, unit = (
            torch.cat(sides)
            for sides in zip(*((collected.x, collected.scales.unit) for collected in waiting), strict=True)
        )
        optional = zip(*((collected.e, collected.y, collected.scales.shift) for collected in waiting), strict=True)
        stored = ([side for side in sides if side is not None] for sides in optional)
        e, y, shift = (torch.cat(sides) if sides else None for sides in stored)
        self._take(numbers, waiting[0].col, x, e, Scaling(unit, shift), y)

    def _take_each(self, height: int, of: _Rows) -> None:
        """Process ``height`` rows at a time, so that sums that are not finite exclude only the rows around them."""
        unit = of.scales.unit
        for first in range(0, len(of.numbers), height):
            part = slice(first, first + height)
            e, y, shift = (
                side if side is None or len(side) == 1 else side[part] for side in (of.e, of.y, of.scales.shift)
            )
            scales = Scaling(unit if len(unit) == 1 else unit[part], shift)
            self._take(of.numbers[part], of.col, of.x[part], e, scales, y)

    def _take(
        self, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling, y: Tensor | None
    ) -> bool:
        """Add the losses of rows; if a sum is not finite, leave these out and return False."""
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
        losses = measure_losses(self._weight.levels, x, e, scales, groups, largest, y, self.one_zero)
        if not bool(torch.cat([numbers.flatten() for numbers in losses]).isfinite().all()):
            return False
        step = self._find_step(losses, rows, col // groups.cols)
        if step is not None:
            losses = self._accept_near_scales(losses, step, col // groups.cols)
        places: Sequence[int] = range(col, col + cols, groups.cols)
        if order is not None or (groups.rows == 1 and len(places) == 1):
            places = [-1]
        if groups.whole or largest is not None:
            self._add_parts(rows, col, x, scales, groups, losses)
        self._sampled.append(
            _SampledGroups(losses, rows[:: groups.rows], places, groups.rows * groups.cols, groups.whole, step)
        )
        return True

    def _add_parts(
        self, rows: Sequence[int], col: int, x: Tensor, scales: Scaling, groups: ScaleGroups, losses: Losses
    ) -> None:
        """Add parts of groups of float codes whose scales are far too large, by which parts with small values lose."""
        levels, cols = self._weight.levels, x.shape[1]
        if not self.has_floats or scales.shift is not None or not levels or groups.cols % PART_COLUMNS:
            return
        if bool((losses.needed < 1 / MAX_SCALE_RATIO).any()):
            parts = measure_part_losses(levels, x, scales.unit, losses, groups, PART_COLUMNS)
            self._within.append(_SampledGroups(parts, rows, range(col, col + cols, PART_COLUMNS), PART_COLUMNS))

    def _find_largest(self, rows: Sequence[int]) -> float | None:
        """Return the largest magnitude in the group of these rows; None if unknown, or if they are in two groups."""
        if self._has_one_scale:
            return self._largest
        if self._runs is None or not self._weight.matrix_rows:
            return None
        experts = {row // self._weight.matrix_rows for row in rows}
        return float(self._runs[experts.pop()]) if len(experts) == 1 else None

    def _find_step(self, losses: Losses, rows: Sequence[int], first: int) -> Tensor | None:
        """Return the step that divides each group's scale; None if scales are not multiples of a step.

        ``first`` is the index of the first group in its row.
        """
        steps = self._weight.scale_steps
        if steps is None:
            return None
        if steps.of_largest and self._runs is not None:
            groups = range(first, first + losses.good.shape[1])
            return find_run_steps(self._weight, self._runs, rows, groups).to(losses.good.device, torch.float64)
        if steps.of_largest:
            return torch.full_like(losses.good, steps.of_largest * float(losses.good.max()))
        return _compute_step(losses.good, steps.scales, steps, first)

    def _accept_near_scales(self, losses: Losses, step: Tensor, first: int) -> Losses:
        """Count stored scales within one step of a good one as good; ``first`` is as in :meth:`_find_step`."""
        steps = self._weight.scale_steps
        near = (losses.stored - losses.good).abs() <= step
        if steps and steps.minima:
            near &= losses.moved <= _compute_step(losses.lowest, steps.minima, steps, first)
        return losses._replace(
            good_sq=torch.where(near, torch.maximum(losses.good_sq, losses.stored_sq), losses.good_sq)
        )

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

    def result(self, attainable: Attainable, beside: "ScaleSampler | None") -> Attainable:
        """Add the loss of scales to ``attainable``, the result for codes; ``beside`` samples conspicuous groups."""
        samplers = [sampler for sampler in (self, beside) if sampler]
        for sampler in samplers:
            sampler._take_waiting()
        every = [groups for sampler in samplers for groups in (*sampler._sampled, *sampler._within)]
        parts = self._find_regions(every)
        attainable = replace(attainable, parts=(*attainable.parts, *parts))
        if not self._sampled:
            return attainable
        stored = sum(float(groups.losses.stored_sq.sum()) for groups in self._sampled)
        ways = (0, -1) if any(len(groups.losses.good_sq) > 1 for groups in self._sampled) else (0,)
        good = max(sum(float(groups.losses.good_sq[way].sum()) for groups in self._sampled) for way in ways)
        worst = sum(float(groups.losses.worst_sq.sum()) for groups in self._sampled)
        x_sq = sum(float(groups.losses.x_sq.sum()) for groups in self._sampled)
        ratios = torch.cat(
            [(groups.losses.stored / groups.losses.good)[groups.losses.x_sq > 0] for groups in self._sampled]
        )
        ratio = float(ratios.median()) if len(ratios) else 1.0
        return add_loss(attainable, GroupSums(x_sq, stored, good, worst), ratio, self._lucky)

    def _find_regions(self, sampled: Sequence[_SampledGroups]) -> tuple[BadRegion, ...]:
        """Find groups with scales far worse than good ones; kind ``underflow`` if good ones are too small to store."""
        bad_groups: dict[Kind, dict[tuple[int, int], _BadGroup]] = {"group": {}, "underflow": {}}
        max_ratio = get_clipping_limit(self._weight.levels)
        for sampled_groups in sampled:
            stored, good = sampled_groups.losses.stored, sampled_groups.losses.good
            # Rounding to a step may change a chosen scale by this much.
            half = 0.0 if sampled_groups.step is None else sampled_groups.step / 2
            zero = stored == 0
            far = zero | (sampled_groups.losses.stored_sq > MIN_ERROR_RATIO * sampled_groups.losses.good_sq.amax(0))
            clips_bytes = self._clips_bytes(sampled_groups)
            if (
                not sampled_groups.whole
                or sampled_groups.size < MIN_GROUP_ELEMENTS
                or not bool((far | clips_bytes).any())
            ):
                continue
            lost = 10 * (sampled_groups.losses.stored_sq / _get_good_sq(sampled_groups.losses, self._lucky)).log10()
            clips = sampled_groups.losses.needed > 1
            fits = (sampled_groups.losses.used * stored > (stored - half) / MAX_SCALE_RATIO) & (
                good < max_ratio * (stored + half)
            )
            fits &= (lost < CLIPPED_DB) | ~clips
            out = torch.where(zero, (lost > ZERO_DB) & (good >= half / MIN_SCALE_RATIO), (lost > GROUP_DB) & ~fits)
            out = (out | clips_bytes) & (
                sampled_groups.losses.stored_sq > NEGLIGIBLE_SHARE * sampled_groups.losses.x_sq
            )
            for down, across in out.nonzero().tolist():
                place = (
                    sampled_groups.rows[down],
                    sampled_groups.cols[across] if across < len(sampled_groups.cols) else -1,
                )
                group = _BadGroup(
                    float(lost[down, across]), place, sampled_groups.size, sampled_groups.losses, (down, across)
                )
                step = self._find_smallest_scale(group)
                if group.good < UNDERFLOW_RATIO * step and group.stored < UNDERFLOW_RATIO * step:
                    bad_groups["underflow"][place] = group
                elif abs(group.stored - group.good) > step:
                    bad_groups["group"][place] = group
        return tuple(
            _make_region(region_kind, list(groups.values()), self._lucky)
            for region_kind, groups in bad_groups.items()
            if groups
        )

    def _clips_bytes(self, groups: _SampledGroups) -> Tensor:
        """Return which groups of 8-bit codes clip their largest value, which matters to its row."""
        levels = self._weight.levels
        is_byte = levels is not None and levels.number >= LEVELS_OF_BYTE and groups.size >= MIN_CLIPPING_ELEMENTS
        if not is_byte or (groups.size > MAX_CLIPPING_ELEMENTS and levels and not levels.mantissa):
            return torch.zeros_like(groups.losses.needed, dtype=torch.bool)
        half = 0.0 if groups.step is None else groups.step / 2
        clips = (groups.losses.good > CLIPPING_LIMITS[LEVELS_OF_BYTE] * (groups.losses.stored + half)) & (
            groups.losses.stored > 0
        )
        if not bool(clips.any()):
            return clips
        if bool(
            (groups.losses.stored.frexp().mantissa == 0.5).all()
        ):  # the rule of OCP's MX formats clips up to an eighth
            return torch.zeros_like(clips)
        return clips & (groups.losses.stored_sq > MIN_LOSS_RATIO * groups.losses.good_sq.amax(0))

    @cached_property
    def _smallest(self) -> Callable[[int], Tensor | None]:
        return cache(self._find_smallest or (lambda row: None))

    def _find_smallest_scale(self, group: "_BadGroup") -> float:
        """Return the smallest scale of a group that can be stored, of which small ones are multiples; 0 if unknown."""
        if self._weight.scales_are_float16:
            return SUBNORMAL
        row, col = group.place
        smallest = self._smallest(row) if col >= 0 else None
        return 0.0 if smallest is None else float(smallest[0, min(col, smallest.shape[1] - 1)])


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


def add_loss(attainable: Attainable, sums: GroupSums, ratio: float, lucky: float) -> Attainable:
    """Add the loss of scales to the result for codes; ``ratio`` is the median of stored / good scale."""
    x_sq, stored_sq, good_sq, worst_sq = sums
    if good_sq < lucky * worst_sq:
        good_sq = max(good_sq, min(stored_sq, worst_sq))
    # Scales of zero have the maximum error, which is x itself.
    return replace(attainable, stored_sq=stored_sq, good_sq=min(good_sq, x_sq), scale_ratio=ratio)


def get_lucky_share(levels: Levels | None) -> float:
    """Return the share of the maximum error below which the error of good scales is small by chance."""
    return LUCKY_SHARE_FINE if levels and not levels.mantissa and levels.number >= MIN_FINE_LEVELS else LUCKY_SHARE


def get_clipping_limit(levels: Levels | None) -> float:
    """Return the maximum of good / stored scale that is not wrong."""
    number = levels.number if levels else 0
    return next(limit for minimum, limit in CLIPPING_LIMITS.items() if number >= minimum)


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


def _make_region(region_kind: Kind, groups: list[_BadGroup], lucky: float) -> BadRegion:
    groups.sort(key=lambda group: (group.stored != 0, -group.lost_db, group.place))
    _, worst, size, of, at = groups[0]
    x_sq, stored_sq, good_sq, stored, good = (
        float(numbers[at]) for numbers in (of.x_sq, of.stored_sq, _get_good_sq(of, lucky), of.stored, of.good)
    )
    return BadRegion(
        region_kind,
        len(groups),
        size,
        tuple(sorted(group.place for group in groups[:MAX_LISTED_GROUPS])),
        worst,
        level(x_sq, stored_sq),
        level(x_sq, good_sq),
        stored / good if good else inf,
    )


def _get_good_sq(losses: Losses, lucky: float) -> Tensor:
    """Return the error of each group with good scales, by the rule with the larger error.

    An error that is small only by chance is replaced by the maximum error.
    """
    good_sq = losses.good_sq.amax(0)
    return torch.where(good_sq < lucky * losses.worst_sq, losses.worst_sq, good_sq)


def _compute_step(sizes: Tensor, number: int, steps: ScaleSteps, first: int) -> Tensor:
    """Return the step that divides the scales, or minima, of groups (down, across).

    Steps are stored as float16, so for a subnormal step, ``number`` times its rounding error is added.
    """
    before = first % steps.shared
    padded = torch.nn.functional.pad(sizes, (before, -(before + sizes.shape[1]) % steps.shared))
    maxima = padded.view(len(sizes), -1, steps.shared).amax(2).repeat_interleave(steps.shared, 1)
    return maxima[:, before : before + sizes.shape[1]] / number + number * SUBNORMAL


def _is_one(unit: Tensor) -> bool:
    """Return whether all codes have the same factor; they do not if factors of rows or columns were undone."""
    return bool(unit.amax() - unit.amin() <= MAX_UNIT_DIFFERENCE * unit.abs().amax())


def _thin_out(side: Tensor) -> Tensor:
    """Copy every :data:`ROW_STEP`-th row of (1 or r, c), or the only row."""
    return (side if side.shape[0] == 1 else side[::ROW_STEP]).clone()


def _take_columns(scales: Scaling, which: Tensor | slice) -> Scaling:
    unit, shift = (side if side is None or side.shape[1] == 1 else side[:, which] for side in scales)
    assert unit is not None  # noqa: S101
    return Scaling(unit, shift)
