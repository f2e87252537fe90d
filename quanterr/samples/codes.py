"""The minimum error with a weight's stored scales, measured by rounding a sample of rows to the nearest codes."""

from collections.abc import Callable, Sequence
from itertools import product
from math import nan
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.kernel.library import Kernel
from quanterr.kernel.structs import TILE
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics.attainable import Attainable, BadRegion, Kind, level
from quanterr.samples.nearest import Nearest
from quanterr.samples.rows import list_rows
from quanterr.tensors.chunks import Chunk

MIN_REGION_ELEMENTS = 32  # smaller regions are not judged
PART_DB = 4.0  # minimum excess of a region that stands out, over what its scales allow and over the rest of the weight
NEGLIGIBLE_DB = 0.005  # a smaller excess may come from the rounding of sums
COMPENSATED_DB = 0.5  # with a larger median excess, errors compensate each other, as after GPTQ
# Minimum excess of a tile that stands out, over its row and columns, if errors compensate each other: GPTQ accumulates
# error in the last columns of a group, and where a row has an outlier. The largest excess among 100,000 tiles of 72
# GPTQ weights of 3 to 8 bits is 13.4.
TILE_DB = 16.0
# If the squared cosine of a column of both sides is smaller, it may hold other values, however large the errors of a
# method are. Of independent normal values in 48 rows, one column of 3,000 has a larger one. If one of two
# exchanged columns is missed for that reason, the other is still found.
MIN_SQUARED_COSINE = 0.25
MIN_TILES = 4  # minimum number of tiles of a row or column for comparisons between them
BETTER_DB = 3.0  # a region stands out only if its error is above the attainable error of its weight minus this
# An error below this share of a region's energy does no harm, even if other codes are far better.
NEGLIGIBLE_SHARE = 1e-6
MIN_ENERGY, MAX_ENERGY = 2.0**-80, 2.0**100  # range of energies whose squares in float32 are accurate
MIN_LOST_SHARE = 0.5  # the scale of a region is lost if y is zero and more than this share of it is out of range
ALL_ROWS_OR_COLUMNS = (-1,)  # start of a region that spans all rows, or columns, of a sample
MAX_LISTED_REGIONS = 64  # maximum number of listed regions of a kind
MIN_EXPLAINED_SHARE = 0.5  # a factor explains a region's error if it removes more than this share of it
# A region's scale is wrong only if its factor differs from the median factor by more than this.
MIN_FACTOR_DIFFERENCE = 0.08
# A factor stands apart if it is more than so many median differences away: four standard deviations.
MIN_MEDIAN_DIFFERENCES = 6.0
# Minimum deviation of a wrong factor from 1; as thousands of regions are tested, 2 would be too few.
MIN_STANDARD_ERRORS = 3.0
MIN_FACTOR_EXCESS_DB = 1.0  # minimum excess of a region with a wrong factor over the usual excess


class _Energies(NamedTuple):
    """Sums over n regions, (7, n) float64: x², (y - x)², (nearest - x)², xy, y², count out of range, (x·(y - x))²."""

    sums: Tensor
    rows: Sequence[int]  # first rows of the regions, which are ordered row by row
    cols: Sequence[int]  # first columns of the regions
    size: int  # elements of a region

    @property
    def places(self) -> list[tuple[int, int]]:
        """The (row, column) of the first element of each region."""
        return list(product(self.rows, self.cols))


class _Sums(NamedTuple):
    """Counts and sums over a few rows, (r, c), and the sums of :class:`_Energies` over rows, columns and tiles."""

    n: int
    off: float
    clipped: float
    beyond_sq: float
    clipped_sq: float
    clipped_x_sq: float
    rows: Tensor  # (7, r)
    columns: Tensor  # (7, c)
    tiles: Tensor  # (7, r · whole tiles of a row)
    weighted_e_sq: float = 0.0
    weighted_best_sq: float = 0.0


class Sampler:
    """Adds up the errors of sampled chunks, and finds regions that stand out."""

    def __init__(self, importance: Callable[[Chunk], Tensor] | None = None, kernel: Kernel | None = None) -> None:
        """Start empty; ``importance`` returns the importance of a chunk's elements, (1 or r, c), if known.

        Without importance, the ``kernel`` computes the sums, if given.
        """
        self._importance, self._kernel = importance, kernel
        self._weighted_e_sq = self._weighted_best_sq = self._beyond_sq = 0.0
        self._steps_sq: float | None = 0.0
        self._n = self._off = self._clipped = 0
        self._x_sq = self._e_sq = self._best_sq = self._clipped_sq = self._clipped_x_sq = 0.0
        self._rows: list[_Energies] = []
        self._tiles: list[_Energies] = []
        self._columns: dict[tuple[int, int], _Energies] = {}

    def add(
        self, chunks: Sequence[Chunk], x: Tensor, y: Tensor, nearest: Nearest, rounding: float | None = None
    ) -> None:
        """Add the rows of chunks of the same columns, (r, c) float32.

        Elements whose x, y or nearest code is not finite are left out. ``rounding`` is the mean square error in steps,
        if all codes are the nearest.
        """
        self._steps_sq = None if self._steps_sq is None or rounding is None else self._steps_sq + rounding * x.numel()
        sums = self._sum_natively(x, y, nearest) or self._sum(chunks, x, y, nearest)
        x_sq, e_sq, best_sq = sums.rows[:3].sum(1).tolist()
        self._n += sums.n
        self._off += int(sums.off)
        self._clipped += int(sums.clipped)
        self._x_sq += x_sq
        self._e_sq += e_sq
        self._best_sq += best_sq
        self._beyond_sq += sums.beyond_sq
        self._clipped_sq += sums.clipped_sq
        self._clipped_x_sq += sums.clipped_x_sq
        self._weighted_e_sq += sums.weighted_e_sq
        self._weighted_best_sq += sums.weighted_best_sq
        self._add_parts(list_rows(chunks), range(chunks[0].col, chunks[0].stop_col), sums)

    def _sum_natively(self, x: Tensor, y: Tensor, nearest: Nearest) -> _Sums | None:
        """Sum with the kernel; None if there is none, or if it cannot."""
        best, steps, outside = nearest
        floats = x, y, best, steps
        can_be_read = all(side.is_cpu and side.dtype == torch.float32 and side.is_contiguous() for side in floats)
        if self._kernel is None or self._importance or not can_be_read:
            return None
        rows, cols = x.shape
        sizes = (7, rows), (7, cols), (7, rows * (cols // TILE)), (5,)
        sums = [torch.empty(size, dtype=torch.float64) for size in sizes]
        outside = outside.contiguous()
        given, out = ([side.data_ptr() for side in sides] for sides in ((*floats, outside), sums))
        if not self._kernel.library.quanterr_sum_regions(*given, rows, cols, *out):
            return None
        return _Sums(x.numel(), *sums[3].tolist(), *sums[:3])

    def _sum(self, chunks: Sequence[Chunk], x: Tensor, y: Tensor, nearest: Nearest) -> _Sums:
        best, outside = nearest.values, nearest.outside
        fine = (y + best).add_(x).isfinite()
        if not bool(fine.all()):
            x, y, best = (torch.where(fine, side, 0.0) for side in (x, y, best))
            outside = outside & fine
        off = (nearest.steps > 1.5) & ~outside & fine
        on_one_side = ((y > x) & (best > x)) | ((y < x) & (best < x))
        beyond = (nearest.steps > 0.5) & on_one_side & ~outside & fine
        products = _multiply(x, y, best, outside)
        x_sq, e_sq, best_sq = products[:3]
        weighted = 0.0, 0.0
        if self._importance:
            importance = torch.cat([self._importance(chunk).expand(chunk.shape) for chunk in chunks])
            columns = importance.to(x.device).double()
            weighted = float((e_sq * columns).sum()), float((best_sq * columns).sum())
        tiles = products[:, :, : x.shape[1] // TILE * TILE].reshape(7, len(x), -1, TILE).sum(3).flatten(1)
        counts = int(fine.sum()), int(off.sum()), int(outside.sum())
        sums = float(e_sq[beyond].sum()), float(best_sq[outside].sum()), float(x_sq[outside].sum())
        return _Sums(*counts, *sums, products.sum(2), products.sum(1), tiles, *weighted)

    def _add_parts(self, rows: Sequence[int], cols: range, sums: _Sums) -> None:
        """Add sums by rows, columns and tiles."""
        self._rows.append(_Energies(sums.rows, rows, ALL_ROWS_OR_COLUMNS, len(cols)))
        before = self._columns.get((cols.start, cols.stop))
        columns, size = sums.columns, len(rows)
        if before:
            columns, size = columns + before.sums, size + before.size
        self._columns[cols.start, cols.stop] = _Energies(columns, ALL_ROWS_OR_COLUMNS, cols, size)
        whole = len(cols) // TILE * TILE
        if whole:
            self._tiles.append(_Energies(sums.tiles, rows, cols[:whole:TILE], TILE))

    def result(self) -> Attainable:
        """Return the results over all chunks."""
        energies = self._x_sq, self._e_sq, self._best_sq, self._clipped_sq, self._clipped_x_sq
        attainable = Attainable(self._n, *energies, off=self._off, clipped=self._clipped, beyond_sq=self._beyond_sq)
        if self._steps_sq is not None and self._n and may_trust(self._x_sq, self._e_sq):
            attainable = replace(attainable, rounding=self._steps_sq / self._n)
        if self._importance:
            attainable = replace(attainable, weighted_e_sq=self._weighted_e_sq, weighted_best_sq=self._weighted_best_sq)
        if self._off or self._clipped or attainable.excess_db > NEGLIGIBLE_DB:
            parts = tuple(self._find_regions(attainable))
            return replace(attainable, parts=parts, unlike_columns=self._find_unlike_columns())
        return attainable

    def _find_unlike_columns(self) -> tuple[int, ...]:
        """Return the columns that hardly correlate with those of the original."""
        unlike = []
        for energies in self._columns.values():
            x_sq, _, _, xy, y_sq, *_ = energies.sums
            columns = (xy.square() < MIN_SQUARED_COSINE * x_sq * y_sq).nonzero().flatten().tolist()
            unlike += [energies.cols[column] for column in columns]
        return tuple(unlike)

    def find_bad_regions(self, weight: Attainable) -> tuple[BadRegion, ...]:
        """Return the added rows and tiles whose error is far larger than their scales allow.

        An outlier next to a tile may dominate the energy of its row. ``weight`` is the result of the whole sample.
        """
        row, tile = (_find_outstanding(*of, weight) for of in (("row", self._rows), ("tile", self._tiles)))
        if row and tile and {place[0] for place in tile.places} <= {place[0] for place in row.places}:
            tile = None
        return tuple(part for part in (row, tile) if part)

    def _find_regions(self, whole: Attainable) -> list[BadRegion]:
        energies_by_kind: dict[Kind, Sequence[_Energies]] = {
            "row": self._rows,
            "column": list(self._columns.values()),
            "tile": self._tiles,
        }
        return [
            part
            for region_kind, energies in energies_by_kind.items()
            if (part := _find_outstanding(region_kind, energies, whole))
        ]


def may_trust(x_sq: float, e_sq: float) -> bool:
    """Return whether float32 squares are accurate in sums of this size."""
    return MIN_ENERGY <= x_sq <= MAX_ENERGY and e_sq <= MAX_ENERGY


def _multiply(x: Tensor, y: Tensor, best: Tensor, outside: Tensor) -> Tensor:
    """Return the products that :class:`_Energies` sums, (7, r, c) float64: float32 squares overflow or vanish."""
    products = torch.empty((7, *x.shape), dtype=torch.float64, device=x.device)
    x_sq, e_sq, best_sq, xy, y_sq, clipped, scatter = products
    x_sq.copy_(x)
    y_sq.copy_(y)
    torch.mul(x_sq, y_sq, out=xy)
    torch.sub(y_sq, x_sq, out=e_sq)
    best_sq.copy_(best).sub_(x_sq)
    for side in (x_sq, e_sq, best_sq, y_sq):
        side.square_()
    clipped.copy_(outside)
    torch.mul(x_sq, e_sq, out=scatter)
    return products


def _find_outstanding(region_kind: Kind, regions: Sequence[_Energies], whole: Attainable) -> BadRegion | None:
    """Find regions whose error is far above what their scales allow and above the rest; None if there are none."""
    regions = [energies for energies in regions if energies.size >= MIN_REGION_ELEMENTS]
    if not regions:
        return None
    size = regions[0].size
    x_sq, e_sq, best_sq, xy, y_sq, outside, scatter = torch.cat([region.sums for region in regions], 1)
    excess = 10 * (e_sq / (best_sq + NEGLIGIBLE_SHARE * x_sq)).log10().nan_to_num(nan=0.0, neginf=0.0)
    rest = _leave_peak_out(whole, x_sq, e_sq, best_sq)
    usual = min(max(float(excess.median()), 0.0), rest.excess_db)
    bad = e_sq * rest.x_sq > x_sq * rest.best_sq / 10 ** (BETTER_DB / 10)
    factors = (xy / x_sq).nan_to_num(1.0, 1.0, 1.0)
    explained = e_sq - (y_sq - factors * xy)
    # The median of one or two rows beyond a sample means nothing.
    middle = factors.median() if len(factors) >= MIN_TILES else 1.0
    away = (factors - middle).abs()
    beyond = e_sq - best_sq * 10 ** (usual / 10) if region_kind == "row" else e_sq  # smaller regions agree by chance
    scaled = (
        (explained > MIN_EXPLAINED_SHARE * beyond)
        & (away > MIN_FACTOR_DIFFERENCE)
        & (excess > usual + MIN_FACTOR_EXCESS_DB)
    )
    scaled &= (
        xy - x_sq
    ).square() > MIN_STANDARD_ERRORS**2 * scatter  # significant over all elements, not only due to the largest one
    lost = (outside > MIN_LOST_SHARE * size) & (y_sq == 0)
    far = excess > 3 * usual + PART_DB
    if usual > COMPENSATED_DB:  # GPTQ leaves an excess in all regions, which may be large in a column
        bad = (e_sq * rest.x_sq > x_sq * rest.e_sq * 10 ** (BETTER_DB / 10)) & (region_kind != "column")
        if region_kind == "tile" and bool((far & bad).any()):
            bad &= _measure_excess(e_sq, _list_places(regions)) > TILE_DB
        if region_kind != "row":
            scaled &= best_sq < x_sq / 2
        lost |= (y_sq == 0) & (best_sq < x_sq / 2)
    out = (far & bad | scaled | lost).nonzero().view(-1)
    if not len(out):
        return None
    places = _list_places(regions)
    order = out[(e_sq / x_sq)[out].argsort(descending=True, stable=True)][:MAX_LISTED_REGIONS]
    worst = int(order[0])
    factor = float(factors[worst]) if explained[worst] > MIN_EXPLAINED_SHARE * beyond[worst] else nan
    return BadRegion(
        region_kind,
        len(out),
        size,
        tuple(sorted(places[number] for number in order.tolist())),
        places[worst],
        level(float(x_sq[worst]), float(e_sq[worst])),
        level(float(x_sq[worst]), float(best_sq[worst])),
        factor,
        level(float(e_sq[worst]) / size, whole.e_sq / max(whole.n, 1)),
        bool(scaled[worst]) and float(away[worst]) > MIN_MEDIAN_DIFFERENCES * float(away.median()),
    )


def _leave_peak_out(whole: Attainable, x_sq: Tensor, e_sq: Tensor, best_sq: Tensor) -> Attainable:
    """Return the energies of a sample without the region that holds more than half of its energy, if there is one.

    If one value is massive, all other regions have a far larger relative error than the sample as a whole.
    """
    peak = int(x_sq.argmax())
    if not whole.x_sq / 2 < float(x_sq[peak]) < whole.x_sq:
        return whole
    energies = (whole.x_sq, x_sq), (whole.e_sq, e_sq), (whole.best_sq, best_sq)
    of_x, of_e, of_best = (max(of - float(part[peak]), 0.0) for of, part in energies)
    return Attainable(whole.n, of_x, of_e, of_best)


def _list_places(regions: Sequence[_Energies]) -> list[tuple[int, int]]:
    return [place for energies in regions for place in energies.places]


def _measure_excess(e_sq: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """Return the excess in dB of each tile's error over its row and its columns, (n,)."""
    left = 10 * e_sq.clamp(min=torch.finfo(e_sq.dtype).tiny).log10()
    for axis in (1, 0):
        numbers = torch.tensor([place[axis] for place in places], device=e_sq.device)
        _, group, sizes = numbers.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
        order = left.argsort()
        order = order[group[order].argsort(stable=True)]  # sorted by group, and ascending in each
        medians = left[order[sizes.cumsum(0) - sizes + (sizes - 1) // 2]].where(sizes >= MIN_TILES, 0.0)
        left = left - medians[group]
    return left
