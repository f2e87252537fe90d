"""What the stored scales of a weight allow: a sample of its rows, read again and rounded to the nearest codes.

The rows are chosen by their number, so that the same weight always gives the same digits.
"""

from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.metrics.attainable import Attainable, Kind, Part, level
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.levels import Nearest

SMALL = 1 << 14  # elements of a weight that is sampled as a whole
RUNS, RUN = 6, 8  # runs of rows, spread over the weight, and the rows of each
WIDEST = 1 << 16  # columns of a sampled row
TILE = 64  # columns of a tile, in one row
FEWEST = 32  # elements of a part that is judged
PART_DB = 4.0  # above what the scales allow, and above the rest of the weight: a part stands out
NONE_DB = 0.005  # of excess: nothing but the rounding of sums
BETTER_DB = 3.0  # a part that is so much better than its weight is none, as rounded scales leave it
FLOOR = 1e-6  # of the energy of a part: an error below it is no damage, however much better codes could be
LOST = 0.5  # of the elements of a part of zeros, that are out of range: its scale is lost
MOST_PARTS = 64  # places of one kind that are kept
LIKE = 0.5  # of the error of a part: a factor that takes away so much explains it
FACTOR, FACTOR_DB = (
    0.08,
    1.0,
)  # from the factor of other parts, and above what scales allow: such a part has a wrong scale


def sampled(shape: tuple[int, ...]) -> list[Chunk]:
    """The chunks of a sample: of a small weight all, of others rows in runs that are spread over it."""
    rows, cols = as_matrix(shape)
    if rows * cols <= SMALL or rows <= RUNS * RUN:
        return [Chunk(0, rows, 0, min(cols, WIDEST))] if rows * cols else []
    starts = [number * (rows - RUN) // (RUNS - 1) for number in range(RUNS)]
    wide = -(-cols // WIDEST)
    return [
        Chunk(start, start + RUN, run % wide * WIDEST, min((run % wide + 1) * WIDEST, cols))
        for run, start in enumerate(starts)
    ]


class _Energies(NamedTuple):
    """Σ of x², (y - x)², (n - x)², xy, y² and what is out of range, (6, …) float64; where these parts begin."""

    sums: Tensor
    places: list[tuple[int, int]]
    size: int  # elements of a part


class Sampler:
    """Takes in sampled chunks and sums them up."""

    def __init__(self) -> None:
        """Start with none."""
        self._n = self._off = self._clipped = 0
        self._x_sq = self._e_sq = self._best_sq = self._clipped_sq = self._clipped_x_sq = 0.0
        self._chunks: list[tuple[Chunk, Tensor]] = []

    def add(self, chunk: Chunk, x: Tensor, y: Tensor, nearest: Nearest) -> None:
        """Take in a chunk, (r, c) float32. Elements that are not finite on any side or in their scale are left out."""
        best, outside = nearest.values, nearest.outside
        fine = (y + best).add_(x).isfinite()
        if not bool(fine.all()):
            x, y, best = (torch.where(fine, side, 0.0) for side in (x, y, best))
            outside = outside & fine
        off = (nearest.steps > 1.5) & ~outside & fine
        x, y, best = x.double(), y.double(), best.double()  # squares of float32 overflow, or vanish
        squares = torch.stack((x, y - x, best - x)).square_()
        x_sq, e_sq, best_sq = squares.sum((1, 2)).tolist()
        clipped = squares[:, outside].sum(1)
        self._n += int(fine.sum())
        self._off += int(off.sum())
        self._clipped += int(outside.sum())
        self._x_sq += x_sq
        self._e_sq += e_sq
        self._best_sq += best_sq
        self._clipped_sq += float(clipped[2])
        self._clipped_x_sq += float(clipped[0])
        self._chunks.append((chunk, torch.cat((squares, torch.stack((x * y, y.square(), outside.double()))))))

    def result(self) -> Attainable:
        """What they come to."""
        energies = self._x_sq, self._e_sq, self._best_sq, self._clipped_sq, self._clipped_x_sq
        found = Attainable(self._n, *energies, off=self._off, clipped=self._clipped)
        if self._off or self._clipped or found.excess_db > NONE_DB:
            return found._replace(parts=tuple(self._parts(found)))
        return found

    def worse_rows(self, weight: Attainable) -> tuple[Part, ...]:
        """The rows taken in that are far worse than their scales allow; ``weight`` is the whole sample."""
        part = _standing_out("row", self._rows(), weight) if self._chunks else None
        return (part,) if part else ()

    def _parts(self, whole: Attainable) -> list[Part]:
        kinds: dict[Kind, _Energies | None] = {"row": self._rows(), "column": self._columns(), "tile": self._tiles()}
        found = (_standing_out(kind, energies, whole) for kind, energies in kinds.items() if energies)
        return [part for part in found if part]

    def _rows(self) -> _Energies:
        sums = torch.cat([products.sum(2) for _, products in self._chunks], 1)
        places = [(row, -1) for chunk, _ in self._chunks for row in range(chunk.row, chunk.stop_row)]
        return _Energies(sums, places, self._chunks[0][1].shape[2])

    def _columns(self) -> _Energies | None:
        if len({(chunk.col, chunk.stop_col) for chunk, _ in self._chunks}) > 1:
            return None
        chunk = self._chunks[0][0]
        sums = torch.stack([products.sum(1) for _, products in self._chunks]).sum(0)
        rows = sum(products.shape[1] for _, products in self._chunks)
        return _Energies(sums, [(-1, col) for col in range(chunk.col, chunk.stop_col)], rows)

    def _tiles(self) -> _Energies | None:
        cols = self._chunks[0][1].shape[2] // TILE * TILE
        if not cols:
            return None
        sums, places = [], []
        for chunk, products in self._chunks:
            tiles = products[:, :, :cols].reshape(*products.shape[:2], -1, TILE).sum(3)
            sums.append(tiles.flatten(1))
            starts = range(chunk.col, chunk.col + cols, TILE)
            places += [(row, col) for row in range(chunk.row, chunk.stop_row) for col in starts]
        return _Energies(torch.cat(sums, 1), places, TILE)


def _standing_out(kind: Kind, energies: _Energies, whole: Attainable) -> Part | None:
    """The parts whose error is far above what their scales allow, and above the rest of the weight; None if none is."""
    if energies.size < FEWEST:
        return None
    x_sq, e_sq, best_sq, xy, y_sq, outside = energies.sums
    excess = 10 * (e_sq / (best_sq + FLOOR * x_sq)).log10().nan_to_num(nan=0.0, neginf=0.0)
    usual = min(max(float(excess.median()), 0.0), whole.excess_db)
    bad = e_sq * whole.x_sq > x_sq * whole.best_sq / 10 ** (BETTER_DB / 10)
    factors = (xy / x_sq).nan_to_num(1.0, 1.0, 1.0)
    explained = e_sq - (y_sq - factors * xy)
    scaled = (explained > LIKE * e_sq) & ((factors - factors.median()).abs() > FACTOR) & (excess > usual + FACTOR_DB)
    lost = (outside > LOST * energies.size) & (y_sq == 0)
    out = ((excess > usual + PART_DB) & bad | scaled | lost).nonzero().view(-1)
    if not len(out):
        return None
    order = out[(e_sq / x_sq)[out].argsort(descending=True, stable=True)][:MOST_PARTS]
    worst = int(order[0])
    factor = float(factors[worst]) if explained[worst] > LIKE * e_sq[worst] else nan
    return Part(
        kind,
        len(out),
        energies.size,
        tuple(sorted(energies.places[number] for number in order.tolist())),
        energies.places[worst],
        level(float(x_sq[worst]), float(e_sq[worst])),
        level(float(x_sq[worst]), float(best_sq[worst])),
        factor,
    )
