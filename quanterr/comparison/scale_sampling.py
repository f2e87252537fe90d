"""What the stored scales of a weight lose beside good ones: sums over sampled groups, and the groups that stand out."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.comparison.conspicuous import spread_over_rows
from quanterr.formats import Weight
from quanterr.metrics.attainable import Attainable, Part, level
from quanterr.tensors.good_scales import Groups, Losses, groups_of, in_order, losses
from quanterr.tensors.levels import Scaling

PART_DB = 5.0  # that the scale of a group loses: it stands out
WIDE, NARROW = 2.2, 0.7  # stored / good scale: between these no scale is wrong, as searches and roundings choose them
CLIPPED_DB = 12.0  # that no search pays for fewer steps in the rest of a group
LUCKY = 0.08  # of the worst error: below it values are few, and codes exact; a third is what rounding leaves
FEWEST = 8  # elements of a group that is judged
FLOOR = 1e-6  # of the energy of a group: an error below it is no damage
ENOUGH, EVERY = 1 << 14, 4  # elements of a sample: of more every fourth row is enough
MOST_PARTS = 64  # places that are kept


class _Sampled(NamedTuple):
    """Groups of a few rows."""

    losses: Losses
    rows: Sequence[int]  # the first of each
    cols: Sequence[int]
    size: int  # elements of each


class ScaleSampler:
    """Takes in sampled chunks, and sums up what their scales lose."""

    def __init__(self, weight: Weight, largest: float | None) -> None:
        """Start with none; ``largest`` is the largest magnitude of the original."""
        self._weight, self._largest = weight, largest
        self._sampled: list[_Sampled] = []

    def add(self, rows: Sequence[int], col: int, x: Tensor, e: Tensor | None, scales: Scaling) -> None:
        """Take in rows from a column on; ``e``, where it is known, is the error of the nearest codes, (r, c)."""
        if self._weight.levels is None or self._weight.encoding == "cast":
            return
        if x.numel() > ENOUGH and self.rows_apart:
            rows, x, e, scales = rows[::EVERY], x[::EVERY], None if e is None else e[::EVERY], _rows(scales)
        groups, order = self._groups(scales, tuple(x.shape))
        if groups is None:
            return
        cols = x.shape[1] // groups.cols * groups.cols
        if order is not None:
            x, e, scales = x[:, order], None if e is None else e[:, order], _columns(scales, order)
        elif cols < x.shape[1]:
            x, e, scales = x[:, :cols], None if e is None else e[:, :cols], _columns(scales, slice(cols))
        largest = self._largest if not groups.whole and self._has_one_scale else None
        found = losses(self._weight.levels, x, e, scales, groups, largest)
        if not all(bool(numbers.isfinite().all()) for numbers in found):
            return
        places: Sequence[int] = range(col, col + cols, groups.cols)
        if order is not None or (groups.rows == 1 and len(places) == 1):
            places = [-1]
        self._sampled.append(_Sampled(found, rows[:: groups.rows], places, groups.rows * groups.cols))

    @property
    def rows_apart(self) -> bool:
        """Whether each row has scales of its own."""
        return not spread_over_rows(self._weight) and not self._has_one_scale

    @property
    def _has_one_scale(self) -> bool:
        return self._weight.scale is not None and self._weight.scale.n == 1 and not self._weight.rotated

    def _groups(self, scales: Scaling, shape: tuple[int, ...]) -> tuple[Groups | None, Tensor | None]:
        """How sampled elements share scales, and the order of columns that brings groups together, if they are not."""
        weight, unit = self._weight, scales.unit
        rows, cols = weight.matrix
        if weight.block_size:
            block = weight.block_size
            units = unit.expand(-1, shape[1])[:, : shape[1] // block[1] * block[1]]
            if not units.numel() or shape[0] % block[0]:
                return None, None
            if groups_of((1 if len(units) == 1 else block[0], block[1]), units):
                return Groups(*block), None
            order = in_order(block[1], units) if block[0] == 1 else None
            return (Groups(*block), order) if order is not None else (None, None)
        of_rows = weight.scale.n >= rows if weight.scale is not None else unit.shape[0] == shape[0]
        if unit.shape[1] > 1 and groups_of((1, shape[1]), unit) is None:
            return None, None
        if of_rows:
            return Groups(1, shape[1], shape[1] == cols), None
        whole = shape == (rows, cols)
        return Groups(shape[0], shape[1], whole) if self._has_one_scale else Groups(1, shape[1], False), None

    def result(self, found: Attainable, beside: "ScaleSampler | None") -> Attainable:
        """The sample of the codes, with what scales lose; the groups that stand out may be ``beside`` it as well."""
        part = _part([*self._sampled, *(beside._sampled if beside else ())])
        found = found._replace(parts=(*found.parts, *((part,) if part else ())))
        if not self._sampled:
            return found
        stored = sum(float(one.losses.stored_sq.sum()) for one in self._sampled)
        good = max(sum(float(one.losses.good_sq[way].sum()) for one in self._sampled) for way in (0, -1))
        worst = sum(float(one.losses.worst_sq.sum()) for one in self._sampled)
        if good < LUCKY * worst:
            good = max(good, min(stored, worst))
        needed = torch.cat([one.losses.needed[one.losses.x_sq > 0] for one in self._sampled])
        return found._replace(
            stored_sq=stored,
            good_sq=good,
            scale_ratio=1 / float(needed.median()) if len(needed) else 1.0,
        )


def _part(sampled: Sequence[_Sampled]) -> Part | None:
    """The groups whose scales are far worse than good ones."""
    places: list[tuple[float, tuple[int, int], int, Losses, tuple[int, int]]] = []
    for one in sampled:
        lost = 10 * (one.losses.stored_sq / _good_sq(one.losses)).log10()
        fits = (one.losses.needed > 1 / WIDE) & (one.losses.needed < 1 / NARROW) & (lost < CLIPPED_DB)
        out = (lost > PART_DB) & (one.losses.stored_sq > FLOOR * one.losses.x_sq) & ~fits
        for down, across in out.nonzero().tolist() if one.size >= FEWEST else ():
            place = one.rows[down], one.cols[across] if across < len(one.cols) else -1
            places.append((float(lost[down, across]), place, one.size, one.losses, (down, across)))
    if not places:
        return None
    places.sort(key=lambda item: (-item[0], item[1]))
    _, worst, size, of, at = places[0]
    x_sq, stored_sq, good_sq, needed = (
        float(numbers[at]) for numbers in (of.x_sq, of.stored_sq, _good_sq(of), of.needed)
    )
    return Part(
        "group",
        len(places),
        size,
        tuple(sorted(place for _, place, *_ in places[:MOST_PARTS])),
        worst,
        level(x_sq, stored_sq),
        level(x_sq, good_sq),
        1 / needed if needed else inf,
    )


def _good_sq(found: Losses) -> Tensor:
    """What groups lose with good scales, however these are rounded, and however near to the codes the values are."""
    good_sq = found.good_sq.amax(0)
    return torch.where(good_sq < LUCKY * found.worst_sq, found.worst_sq, good_sq)


def _rows(scales: Scaling) -> Scaling:
    """Those of every so many rows."""
    unit, shift = (side if side is None or side.shape[0] == 1 else side[::EVERY] for side in scales)
    assert unit is not None  # noqa: S101
    return Scaling(unit, shift)


def _columns(scales: Scaling, which: Tensor | slice) -> Scaling:
    unit, shift = (side if side is None or side.shape[1] == 1 else side[:, which] for side in scales)
    assert unit is not None  # noqa: S101
    return Scaling(unit, shift)
