"""Small weights: their values are kept after the pass, and those alike are examined by the same operations.

An operation of Python or torch costs more than its arithmetic on so few elements. So a few weights are compared, one
after the other, and then sampled together, as long as all their codes and scales are as they should be.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.comparison.native_sums import KeptRows
from quanterr.comparison.scale_sampling import add_losses, find_row_groups
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing.model import LargestError, Pair
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.good_scales import ScaleGroups, are_measured_together, measure_losses
from quanterr.tensors.levels import Levels, Scaling, measure_rounding
from quanterr.tensors.workspace import Workspace

AT_ONCE = 64  # weights that are compared before any is finished, at most
ENOUGH = 1 << 19  # elements of weights that are compared before any is finished: more do not fit the cache
MOST_KEPT = 1 << 14  # elements up to which values are kept, to avoid another read
ROOM = ENOUGH + MOST_KEPT  # elements that are kept of each side
LEAST, MOST = 2.0**-80, 2.0**100  # range of energies in which float32 squares are trusted

Values = tuple[Tensor, Tensor]  # x and y, (r, c) each


class ComparedPair(NamedTuple):
    """A pair with its sums."""

    pair: Pair
    sums: Sums


class Examined(NamedTuple):
    """The results of examining a weight, without its sums."""

    scales: ScaleStatistics | None
    worst: LargestError | None
    attainable: Attainable | None  # None: the weight must be sampled on its own


class _Kind(NamedTuple):
    """The properties that weights must share to be examined together."""

    matrix: tuple[int, int]
    levels: Levels
    groups: ScaleGroups


@dataclass(slots=True)
class _Kept:
    """A small pair whose values are kept."""

    pair: Pair  # its id is the key, which must not be another's meanwhile
    sides: Tensor | Values  # x and y, (n,) each, where they begin at ``first``
    first: int = 0
    groups: ScaleGroups | None = None  # None: the weight is examined on its own
    unit: Tensor | None = None  # (1 or r, 1) float32: the stored scale of each row

    def view(self, shape: tuple[int, int]) -> Values:
        """Return both sides, (r, c) each; also of several weights kept one behind the other, from this one on."""
        stop = self.first + shape[0] * shape[1]
        return self.sides[0][self.first : stop].view(shape), self.sides[1][self.first : stop].view(shape)


class SmallWeights:
    """The values of the small weights that were compared last, and what was found out about them together."""

    def __init__(self, workspace: Workspace, samples: bool = True) -> None:
        """Keep values, and compute, in buffers of ``workspace``; ``samples`` is as for a worker."""
        self._workspace, self._samples = workspace, samples
        self._kept: dict[int, _Kept] = {}  # by the pair's id
        self._before: dict[int, _Kept] = {}  # those before the last turn
        self._side = 0  # of two buffers, the one in use
        self._n = 0  # elements of one side in the buffer
        self._examined: dict[int, Examined] = {}  # by the pair's id

    def turn(self) -> None:
        """Begin with other weights: keep the values of those before them, but of none before these."""
        self._before, self._kept = self._kept, {}
        self._side, self._n = 1 - self._side, 0

    def keep(self, pair: Pair) -> KeptRows:
        """Return where the kernel is to write both sides of a small pair."""
        if self._n + pair.original.n > ROOM:
            self._kept, self._n = {}, 0
        first, self._n = self._n, self._n + pair.original.n
        buffer = self._workspace.buffer(f"kept_{self._side}", (2, ROOM), torch.float32)
        self._kept[id(pair)] = _Kept(pair, buffer, first)
        x = buffer.data_ptr() + first * torch.float32.itemsize
        return KeptRows((x, x + ROOM * torch.float32.itemsize))

    def keep_copies(self, pair: Pair, x: Tensor, y: Tensor) -> None:
        """Keep copies of the values of a small pair, (r, c) each."""
        self._kept[id(pair)] = _Kept(pair, (x.clone().view(-1), y.clone().view(-1)))

    def keep_scales(self, pair: Pair, workspace: Workspace) -> None:
        """Keep the scales of a pair's quantized side too, if it may be examined together with others."""
        weight, kept, (rows, cols) = pair.quantized, self._kept[id(pair)], pair.original.matrix
        kept.groups = find_row_groups(weight)
        if kept.groups is not None and weight.unit is not None:
            kept.unit = weight.unit(Chunk(0, rows, 0, cols), workspace).clone()

    def values(self, pair: Pair) -> Values | None:
        """Return both sides of a pair, (r, c) each; None if they are not kept."""
        kept = self._kept.get(id(pair)) or self._before.get(id(pair))
        return None if kept is None else kept.view(pair.original.matrix)

    def take(self, pair: Pair) -> Examined | None:
        """Return what was found out about a pair together with others, once; None if it was not among them."""
        return self._examined.pop(id(pair), None)

    def examine(self, compared: Iterable[ComparedPair]) -> None:
        """Examine weights whose values are kept, those alike with the same operations."""
        kinds: dict[_Kind, list[ComparedPair]] = {}
        for one in compared:
            kind = self._find_kind(one)
            if kind is not None:
                kinds.setdefault(kind, []).append(one)
        for kind, alike in kinds.items():
            kept = [self._kept[id(one.pair)] for one in alike]
            self._examined |= zip(map(id, (one.pair for one in alike)), self._examine(kind, alike, kept), strict=True)

    def _find_kind(self, compared: ComparedPair) -> _Kind | None:
        """Return what weights must have in common to be examined together; None if a weight is examined on its own."""
        pair, sums = compared
        kept, weight = self._kept.get(id(pair)), pair.quantized
        if kept is None or kept.groups is None or weight.levels is None:
            return None
        if get_largest_error(sums) is None or sums.n != weight.n:
            return None
        return _Kind(weight.matrix, weight.levels, kept.groups)

    def _examine(self, kind: _Kind, alike: Sequence[ComparedPair], kept: Sequence[_Kept]) -> Iterable[Examined]:
        """Examine weights of one kind."""
        x, y = self._stack(kept, kind.matrix)
        rows, units = kind.matrix[0], torch.stack([one.unit for one in kept if one.unit is not None])
        scales, unit = ScaleStatistics.compute_each(units[:, :, 0]), units.expand(-1, rows, -1).reshape(-1, 1)
        worst = (get_largest_error(sums) for _, sums in alike)
        return map(Examined, scales, worst, self._sample(kind, alike, x, y, unit))

    def _stack(self, kept: Sequence[_Kept], shape: tuple[int, int]) -> Values:
        """Return the values of weights of one shape, one below the other: as they are kept, or copies."""
        n, size = len(kept), shape[0] * shape[1]
        if kept[-1].first - kept[0].first == (n - 1) * size:
            return kept[0].view((n * shape[0], shape[1]))
        x, y = (torch.cat(sides) for sides in zip(*(one.view(shape) for one in kept), strict=True))
        return x, y

    def _sample(
        self, kind: _Kind, alike: Sequence[ComparedPair], x: Tensor, y: Tensor, unit: Tensor
    ) -> Sequence[Attainable | None]:
        """Return what the stored scales allow; None for weights whose codes or scales need a closer look."""
        n = len(alike)
        if not (self._samples and are_measured_together(unit, n)):
            return [None] * n
        e = torch.sub(y, x, out=self._workspace.buffer("scratch", tuple(x.shape), torch.float32))
        means = measure_rounding(kind.levels, x, e, Scaling(unit), self._workspace, n)
        losses = measure_losses(kind.levels, x, e, Scaling(unit), kind.groups, weights=n)
        plain = [
            None if mean is None else summarize_plain(sums.n, as_float(sums.x_sq), as_float(sums.e_sq), mean * sums.n)
            for mean, (_, sums) in zip(means, alike, strict=True)
        ]
        return add_losses(kind.levels, plain, losses)


def summarize_plain(n: int, x_sq: float, e_sq: float, steps: float) -> Attainable | None:
    """Return the result for codes that are all the nearest; None if the sums may have lost digits.

    ``steps`` is the sum of the squared errors in steps.
    """
    if not (LEAST <= x_sq <= MOST and e_sq <= MOST):
        return None
    return Attainable(n, x_sq, e_sq, e_sq, rounding=steps / n if n else None)


def get_largest_error(sums: Sums) -> LargestError | None:
    """Return the element with the largest |e|; None if there is no error, or only its row is known."""
    worst = sums.worst
    return None if worst is None or worst.values is None else LargestError(worst.row, worst.col, *worst.values)
