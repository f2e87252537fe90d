"""What the stored scales of a weight allow: a sample of its rows, read again and rounded to the nearest codes.

The rows are chosen by their number, so that the same weight always gives the same digits.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.metrics.attainable import Attainable, Kind, Part, level
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.levels import Nearest

SMALL = 1 << 14  # elements of a weight that is sampled as a whole
RUNS, RUN = 6, 8  # runs of rows, spread over the weight, and the rows of each
WIDEST = 1 << 15  # columns of a sampled row
SMALL_BLOCKS = 1 << 18  # elements of a weight all of whose blocks are sampled
TILE = 64  # columns of a tile, in one row
FEWEST = 32  # elements of a part that is judged
PART_DB = 4.0  # above what the scales allow, and above the rest of the weight: a part stands out
NONE_DB = 0.005  # of excess: nothing but the rounding of sums
COMPENSATED_DB = 0.5  # of excess in half of all parts: their errors make up for each other
# Above what the row and the columns of a tile have, where errors make up for each other: GPTQ piles them up in the last
# columns of a group, and where a row has an outlier. The most of 100,000 tiles of 72 such weights of 3 to 8 bits: 13.4.
TILE_DB = 16.0
FEWEST_ROWS = 4  # of which one may be compared with the others
BETTER_DB = 3.0  # a part that is so much better than its weight is none, as rounded scales leave it
FLOOR = 1e-6  # of the energy of a part: an error below it is no damage, however much better codes could be
LOST = 0.5  # of the elements of a part of zeros, that are out of range: its scale is lost
WHOLE = (-1,)  # where a part begins that goes through all rows, or columns, of a sample
MOST_PARTS = 64  # places of one kind that are kept
LIKE = 0.5  # of the error of a part: a factor that takes away so much explains it
FACTOR = 0.08  # by so much the factor of a part differs from that of the others, where its scale is wrong
SPREAD = 6.0  # times the median of these differences: four standard deviations, as folds that were not found make them
SURE = 3.0  # standard errors of such a factor, one of some thousands
FACTOR_DB = 1.0  # and it is so much worse than its scales allow


def sampled(shape: tuple[int, ...]) -> list[Chunk]:
    """The chunks of a sample: of a small weight all, of others rows in runs that are spread over it."""
    rows, cols = as_matrix(shape)
    if not rows * cols:
        return []
    few = rows * cols <= SMALL or rows <= RUNS * RUN
    starts = [0] if few else [number * (rows - RUN) // (RUNS - 1) for number in range(RUNS)]
    height = rows if few else RUN
    if cols <= WIDEST:
        return [Chunk(start, start + height, 0, cols) for start in starts]
    pieces = -(-cols // WIDEST)  # of wide rows one of each, in turn
    numbers = [start + row for start in starts for row in range(height)]
    return [
        Chunk(number, number + 1, n % pieces * WIDEST, min((n % pieces + 1) * WIDEST, cols))
        for n, number in enumerate(numbers)
    ]


def sampled_blocks(shape: tuple[int, ...], block: tuple[int, int], most: int) -> list[Chunk]:
    """The first of each row of blocks that span rows, ``most`` elements: of a small weight all rows, of others one."""
    rows, cols = as_matrix(shape)
    down = rows // block[0]
    if not down or cols > WIDEST:
        return []
    numbers = range(down) if rows * cols <= SMALL_BLOCKS else [down // 2]
    width = max(most // block[0], block[1])
    return [Chunk(number * block[0], (number + 1) * block[0], 0, min(width, cols)) for number in numbers]


class _Energies(NamedTuple):
    """Σ of x², (y - x)², (n - x)², xy, y², what is out of range and (x·(y - x))², (7, n) float64, of n parts."""

    sums: Tensor
    rows: Sequence[int]  # where they begin: one part after the other goes through the columns, row by row
    cols: Sequence[int]
    size: int  # elements of a part

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where each begins."""
        return list(product(self.rows, self.cols))


class Sampler:
    """Takes in sampled chunks and sums them up."""

    def __init__(self, importance: Callable[[Chunk], Tensor] | None = None) -> None:
        """Start with none; ``importance`` is that of the columns of a chunk, (1 or r, c), where it is known."""
        self._importance = importance
        self._weighted_e_sq = self._weighted_best_sq = self._beyond_sq = 0.0
        self._n = self._off = self._clipped = 0
        self._x_sq = self._e_sq = self._best_sq = self._clipped_sq = self._clipped_x_sq = 0.0
        self._rows: list[_Energies] = []
        self._tiles: list[_Energies] = []
        self._columns: dict[tuple[int, int], _Energies] = {}

    def add(self, chunk: Chunk, x: Tensor, y: Tensor, nearest: Nearest) -> None:
        """Take in a chunk, (r, c) float32. Elements that are not finite on any side or in their scale are left out."""
        best, outside = nearest.values, nearest.outside
        fine = (y + best).add_(x).isfinite()
        if not bool(fine.all()):
            x, y, best = (torch.where(fine, side, 0.0) for side in (x, y, best))
            outside = outside & fine
        off = (nearest.steps > 1.5) & ~outside & fine
        beyond = (nearest.steps > 0.5) & ((y - x) * (best - x) > 0) & ~outside & fine
        products = _products(x, y, best, outside)
        squares = products[:3]
        x_sq, e_sq, best_sq = squares.sum((1, 2)).tolist()
        self._n += int(fine.sum())
        self._off += int(off.sum())
        self._clipped += int(outside.sum())
        self._x_sq += x_sq
        self._e_sq += e_sq
        self._best_sq += best_sq
        self._beyond_sq += float(squares[1, beyond].sum())
        self._clipped_sq += float(squares[2, outside].sum())
        self._clipped_x_sq += float(squares[0, outside].sum())
        if self._importance:
            weighted = (squares[1:] * self._importance(chunk).to(x.device).double()).sum((1, 2))
            self._weighted_e_sq += float(weighted[0])
            self._weighted_best_sq += float(weighted[1])
        self._add_parts(chunk, products)

    def _add_parts(self, chunk: Chunk, products: Tensor) -> None:
        """Add up (7, r, c) by rows, columns and tiles."""
        rows, cols = range(chunk.row, chunk.stop_row), range(chunk.col, chunk.stop_col)
        self._rows.append(_Energies(products.sum(2), rows, WHOLE, len(cols)))
        before = self._columns.get((chunk.col, chunk.stop_col))
        sums, size = products.sum(1), len(rows)
        if before:
            sums, size = sums + before.sums, size + before.size
        self._columns[chunk.col, chunk.stop_col] = _Energies(sums, WHOLE, cols, size)
        whole = len(cols) // TILE * TILE
        if whole:
            tiles = products[:, :, :whole].reshape(7, len(rows), -1, TILE).sum(3).flatten(1)
            self._tiles.append(_Energies(tiles, rows, cols[:whole:TILE], TILE))

    def result(self) -> Attainable:
        """What they come to."""
        energies = self._x_sq, self._e_sq, self._best_sq, self._clipped_sq, self._clipped_x_sq
        found = Attainable(self._n, *energies, off=self._off, clipped=self._clipped, beyond_sq=self._beyond_sq)
        if self._importance:
            found = found._replace(weighted_e_sq=self._weighted_e_sq, weighted_best_sq=self._weighted_best_sq)
        if self._off or self._clipped or found.excess_db > NONE_DB:
            return found._replace(parts=tuple(self._parts(found)))
        return found

    def worse_parts(self, weight: Attainable) -> tuple[Part, ...]:
        """Of rows taken in, those that are far worse than their scales allow; where none is, such tiles: an outlier
        beside a tile may make most of the energy of its row. ``weight`` is the whole sample.
        """
        part = _standing_out("row", self._rows, weight) or _standing_out("tile", self._tiles, weight)
        return (part,) if part else ()

    def _parts(self, whole: Attainable) -> list[Part]:
        kinds: dict[Kind, Sequence[_Energies]] = {
            "row": self._rows,
            "column": list(self._columns.values()),
            "tile": self._tiles,
        }
        return [part for kind, found in kinds.items() if (part := _standing_out(kind, found, whole))]


def _products(x: Tensor, y: Tensor, best: Tensor, outside: Tensor) -> Tensor:
    """What :class:`_Energies` adds up, (7, r, c) float64, of (r, c): squares of float32 overflow, or vanish."""
    found = torch.empty((7, *x.shape), dtype=torch.float64, device=x.device)
    x_sq, e_sq, best_sq, xy, y_sq, clipped, scatter = found
    x_sq.copy_(x)
    y_sq.copy_(y)
    torch.mul(x_sq, y_sq, out=xy)
    torch.sub(y_sq, x_sq, out=e_sq)
    best_sq.copy_(best).sub_(x_sq)
    for side in (x_sq, e_sq, best_sq, y_sq):
        side.square_()
    clipped.copy_(outside)
    torch.mul(x_sq, e_sq, out=scatter)
    return found


def _standing_out(kind: Kind, found: Sequence[_Energies], whole: Attainable) -> Part | None:
    """The parts whose error is far above what their scales allow, and above the rest of the weight; None if none is."""
    found = [energies for energies in found if energies.size >= FEWEST]
    if not found:
        return None
    size = found[0].size
    x_sq, e_sq, best_sq, xy, y_sq, outside, scatter = torch.cat([one.sums for one in found], 1)
    excess = 10 * (e_sq / (best_sq + FLOOR * x_sq)).log10().nan_to_num(nan=0.0, neginf=0.0)
    usual = min(max(float(excess.median()), 0.0), whole.excess_db)
    bad = e_sq * whole.x_sq > x_sq * whole.best_sq / 10 ** (BETTER_DB / 10)
    factors = (xy / x_sq).nan_to_num(1.0, 1.0, 1.0)
    explained = e_sq - (y_sq - factors * xy)
    away = (factors - factors.median()).abs()
    scaled = (explained > LIKE * e_sq) & (away > FACTOR) & (excess > usual + FACTOR_DB)
    scaled &= (xy - x_sq).square() > SURE**2 * scatter  # by all of its elements, not by the largest alone
    lost = (outside > LOST * size) & (y_sq == 0)
    far = excess > 3 * usual + PART_DB
    if usual > COMPENSATED_DB:  # GPTQ leaves some in all parts, and any amount in a column
        bad = (e_sq * whole.x_sq > x_sq * whole.e_sq * 10 ** (BETTER_DB / 10)) & (kind != "column")
        if kind == "tile":
            bad &= _above_others(e_sq, _places(found)) > TILE_DB
        if kind != "row":
            scaled &= far & (best_sq < x_sq / 2)
        lost |= (y_sq == 0) & (best_sq < x_sq / 2)
    out = (far & bad | scaled | lost).nonzero().view(-1)
    if not len(out):
        return None
    places = _places(found)
    order = out[(e_sq / x_sq)[out].argsort(descending=True, stable=True)][:MOST_PARTS]
    worst = int(order[0])
    factor = float(factors[worst]) if explained[worst] > LIKE * e_sq[worst] else nan
    return Part(
        kind,
        len(out),
        size,
        tuple(sorted(places[number] for number in order.tolist())),
        places[worst],
        level(float(x_sq[worst]), float(e_sq[worst])),
        level(float(x_sq[worst]), float(best_sq[worst])),
        factor,
        level(float(e_sq[worst]) / size, whole.e_sq / max(whole.n, 1)),
        bool(scaled[worst]) and float(away[worst]) > SPREAD * float(away.median()),
    )


def _places(found: Sequence[_Energies]) -> list[tuple[int, int]]:
    return [place for one in found for place in one.places]


def _above_others(e_sq: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """By how many dB the error of each tile is above that of its row and of its columns, (n,)."""
    left = 10 * e_sq.clamp(min=torch.finfo(e_sq.dtype).tiny).log10()
    for axis in (1, 0):
        of = torch.tensor([place[axis] for place in places], device=e_sq.device)
        for one in {place[axis] for place in places}:
            alike = of == one
            if int(alike.sum()) >= FEWEST_ROWS:
                left[alike] -= left[alike].median()
    return left
