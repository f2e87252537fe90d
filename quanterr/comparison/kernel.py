"""The one hot loop: two weights in, chunk by chunk, sums out, in one pass.

There are two ways. :func:`exact_sums` is the specification: float64 throughout, every mask written
out. :func:`fast_sums` is float32 along rows, added up in float64, and declines (None) whatever is not
in range: values that are not finite, so large or so small that float32 squares overflow or lose digits.
A row's sum in float32, which is added in pairs or short segments, is off by 5e-8 of itself (root mean square; at most
2e-7); sums over many rows, of which none is most of the whole, are good to 1e-8, to 5e-8 where all elements are alike.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.metrics import RELATIVE_OUTLIER
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.peaks import WINDOW, Cells
from quanterr.metrics.sums import KEPT_ROWS, RowSums, Sums, WorstRow, exact
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# x and y of a chunk, (r, c), which may be overwritten, and how many zeros y has, where that is known
Load = Callable[[Chunk], tuple[Tensor, Tensor, Tensor | None]]

Importance = Callable[[Chunk], Tensor]  # of the elements of a chunk, (1 or r, c) float32


class Wanted(NamedTuple):
    """What is asked for beside the sums."""

    importance: Importance | None = None
    matrix_rows: int = 0  # of each matrix, where a weight is a stack of them
    cells: Cells | None = None  # whose peaks are
    normal: float = 0.0  # the least normal number of a cast


SUMS_ALONE = Wanted()

# Energies of a row between which float32 is trusted: beyond, squares of single elements overflow, or
# vanish in amounts that could be seen.
LOW, HIGH = 2.0**-100, 2.0**100

# A variance must be this share of the energy, or it drowns in the rounding of the sums it is made from.
SPREAD = 0.01

LEAST_ROWS = 16  # that make up a sum, for the roundings of each to average out

LARGE = 1 << 17  # elements of chunks for whose products a matrix product is worth its fixed price
SEGMENT = 128  # elements of a row that are added one after the other
GEMM_ERROR = 3e-7  # relative: no worse than a sum in pairs; factors that are rounded to TF32 give 2e-4

NO_ENERGY = 1e-5  # of y as a share of that of x: more than float32 sums of x² and of xe differ where y is zero

FEW_ROWS = 1 << 12  # that are sorted as a whole sooner than searched

# What fast_sums keeps of every row, as rows of a (fields, rows) matrix, beside Σx², Σxe, Σex and Σe², (rows, 4).
ADDED = ("x", "e", "x_abs", "e_abs", "relative", "relative_outliers")
WEIGHTED = ("weighted_x_sq", "weighted_e_sq")  # undefined without an importance
EXTREME = ("x_max", "e_max", "e_min")


def fast_sums(
    load: Load,
    chunks: Sequence[Chunk],
    matrix: tuple[int, int],
    workspace: Workspace,
    outlier: float,
    wanted: Wanted = SUMS_ALONE,
) -> Sums | None:
    """Sums of a few chunks of one weight in float32; None if only :func:`exact_sums` is good enough.

    ``matrix`` is (rows, cols) of the whole weight. What is reported of single rows is computed once for all chunks: on
    its own it would cost more than the arithmetic.
    """
    if matrix[0] < LEAST_ROWS:
        return None
    n = sum(chunk.n for chunk in chunks)
    heights = tuple(chunk.shape[0] for chunk in chunks)
    if ("rooms", heights) not in workspace.views:
        workspace.views["rooms", heights] = _rooms(heights, workspace)
    stats, products, rooms = workspace.views["rooms", heights]
    in_segments = all(chunk.shape[1] % SEGMENT == 0 for chunk in chunks)
    by_gemm = n >= LARGE and in_segments and workspace.device.type == "cpu" and _gemm_is_exact()
    multiply = _multiply_at_once if by_gemm else _multiply
    sums = Sums(elements=n, n=n, x_nonzero=n)
    cells = wanted.cells if _are_whole(chunks, matrix[1]) else None
    windows: list[Tensor] | None = [] if cells and cells.cols < matrix[1] else None
    for chunk, room in zip(chunks, rooms, strict=True):
        x, y, y_zeros = load(chunk)
        if y_zeros is None:
            y_zeros = torch.eq(y, 0, out=workspace.buffer("scratch", chunk.shape, torch.float32)).sum()
        sums.zeroed += int(y_zeros)
        sides = _side_by_side(x, y, workspace, by_gemm)
        sides.e.sub_(sides.x)
        multiply(sides, room.products, workspace)
        if wanted.importance:
            columns, scratch = (
                wanted.importance(chunk).to(x.device),
                workspace.buffer("scratch", chunk.shape, torch.float32),
            )
            for side, out in zip(sides.both, room.weighted, strict=True):
                torch.sum(torch.mul(side, side, out=scratch).mul_(columns), 1, out=out)
        if wanted.normal:
            sums.cast_max = max(sums.cast_max, _cast_max(sides, wanted.normal, workspace))
        if not _add_chunk(sides, room, windows, workspace, outlier, sums):
            return None

    rows = _add_up(sums, stats, products, weighted=wanted.importance is not None)
    if rows is None:
        return None
    rows = rows.cpu()
    rows = torch.vstack((rows, _zeroed_rows(load, chunks, rows)))
    _add_rows(sums, chunks, matrix[1], rows)
    if wanted.matrix_rows:
        add_matrices(sums, chunks, wanted.matrix_rows, rows)
    if cells:
        of_rows = stats[-3:-1, :, None] if windows is None else torch.cat(windows, 1)
        sums.peaks = [cells.piece(of_rows, chunks[0].row)]
    return sums


def _are_whole(chunks: Sequence[Chunk], cols: int) -> bool:
    """Whether chunks are of all columns, not pieces of rows."""
    return chunks[0].stop_col - chunks[0].col == cols


def windows_of(values: Tensor) -> Tensor:
    """The largest of each window of columns of magnitudes, (n, r, c) float32: (n, r, windows)."""
    n, rows, cols = values.shape
    whole = cols // WINDOW * WINDOW
    bits = _bits(values)
    found = bits[:, :, :whole].reshape(n, rows, -1, WINDOW).amax(3)
    found = found if whole == cols else torch.cat((found, bits[:, :, whole:].amax(2, keepdim=True)), 2)
    return found.view(torch.float32)


def _bits(magnitudes: Tensor) -> Tensor:
    """The bit patterns of float32 magnitudes: they have the same order, and are compared in half the time."""
    return magnitudes.view(torch.int32)


class _RowBuffers(NamedTuple):
    """Where the sums and extremes of a chunk's rows go: parts of the room for all chunks."""

    sums: Tensor  # (2, r): Σx and Σe
    magnitudes: Tensor  # (2, r): Σ|x| and Σ|e|
    relative: Tensor  # (r,)
    relative_outliers: Tensor
    weighted: Tensor  # (2, r): of x² and e²
    x_max: Tensor
    e_max: Tensor
    e_min: Tensor
    products: Tensor  # (r, 4): Σx², Σxe, Σex and Σe²


def _rooms(heights: tuple[int, ...], workspace: Workspace) -> tuple[Tensor, Tensor, list[_RowBuffers]]:
    """For chunks of this many rows: ``stats`` (fields, rows), ``products`` (rows, 4), and the part of each chunk."""
    stats = workspace.buffer("rows", (len(ADDED) + len(WEIGHTED) + len(EXTREME), sum(heights)), torch.float32)
    products = workspace.buffer("products", (sum(heights), 4), torch.float32)
    sizes = list(heights)
    parts = zip(torch.split(stats, sizes, 1), torch.split(products, sizes), strict=True)
    return stats, products, [_RowBuffers(s[:2], s[2:4], s[4], s[5], s[6:8], s[8], s[9], s[10], p) for s, p in parts]


class _PairBuffer(NamedTuple):
    """x and y of a chunk, (r, c), as one tensor: what both need is asked for once. y becomes e."""

    given: tuple[Tensor, Tensor]
    both: Tensor  # (2, r, c)
    x: Tensor
    e: Tensor
    copied: bool  # as the two given are apart
    pieces: Tensor  # (n, 2, SEGMENT), of segments of x and e; empty where they are not multiplied at once


def _side_by_side(x: Tensor, y: Tensor, workspace: Workspace, in_pieces: bool) -> _PairBuffer:
    """Views cost more than they look, and x and y are most often those of the chunk before."""
    key = "sides", x.shape, in_pieces
    sides: _PairBuffer | None = workspace.views.get(key)
    if sides is None or sides.given[0] is not x or sides.given[1] is not y:
        sides = _sides(x, y, workspace, in_pieces)
        workspace.views[key] = sides
    if sides.copied:
        sides.x.copy_(x)
        sides.e.copy_(y)
    return sides


def _sides(x: Tensor, y: Tensor, workspace: Workspace, in_pieces: bool) -> _PairBuffer:
    step = y.storage_offset() - x.storage_offset()
    one = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and step >= x.numel()
    copied = not (one and x.is_contiguous() and y.is_contiguous())
    if copied:
        both = workspace.buffer("sides", (2, *x.shape), torch.float32)
    else:
        both = x.as_strided((2, *x.shape), (step, x.shape[1], 1))
    pieces = both.view(2, -1, SEGMENT).transpose(0, 1) if in_pieces else both[:0]
    return _PairBuffer((x, y), both, both[0], both[1], copied, pieces)


def _add_chunk(
    sides: _PairBuffer,
    room: _RowBuffers,
    windows: list[Tensor] | None,
    workspace: Workspace,
    outlier: float,
    sums: Sums,
) -> bool:
    """One chunk's part of the sums, of the histogram, of counts and of ``windows``; whether it is in range.

    ``sides`` are x and e, then |x| and |e|, then |x| and |e| / |x|: in place, so that a core's cache holds them, and
    by few operations, as threads that all go back to the interpreter wait for each other.
    """
    x, e = sides.x, sides.e
    torch.sum(sides.both, 2, out=room.sums)
    torch.sum(sides.both.abs_(), 2, out=room.magnitudes)
    if windows is None:
        torch.amax(_bits(x), 1, out=_bits(room.x_max))
        torch.amax(_bits(e), 1, out=_bits(room.e_max))
    else:
        windows.append(windows_of(sides.both))
        torch.amax(windows[-1][0], 1, out=room.x_max)
        torch.amax(windows[-1][1], 1, out=room.e_max)
    largest = float(room.e_max.amax())
    if not isfinite(largest):
        return False
    torch.amin(_bits(e), 1, out=_bits(room.e_min))
    workspace.buffer("bins", tuple(e.shape), torch.bfloat16).copy_(e)
    histogram = Histogram.of_bits(workspace.buffer("bins", (e.numel(),), torch.int16))
    if sums.histogram is None:
        sums.histogram = histogram
    else:
        sums.histogram.add(histogram)
    if largest > outlier:
        scratch = workspace.buffer("scratch", tuple(e.shape), torch.float32)
        sums.outliers += int(torch.gt(e, outlier, out=scratch).sum())

    relative = e.div_(x)
    relative_max = float(relative.amax())
    if not isfinite(relative_max):  # where x = 0: infinity, or NaN where y = 0 too
        zeros = x.eq(0)
        sums.x_nonzero -= int(zeros.sum())
        sums.zero_reference += int((zeros & relative.isinf()).sum())
        relative_max = float(relative.masked_fill_(zeros, 0).amax())
        if not isfinite(relative_max):
            return False
    sums.relative_max = max(sums.relative_max, relative_max)
    torch.sum(relative, 1, out=room.relative)
    torch.sum(relative.gt_(RELATIVE_OUTLIER), 1, out=room.relative_outliers)
    return True


def _cast_max(sides: _PairBuffer, normal: float, workspace: Workspace) -> float:
    """The largest of |e| / max(|x|, normal)."""
    sizes = workspace.buffer("scratch", tuple(sides.x.shape), torch.float32)
    torch.clamp(torch.abs(sides.x, out=sizes), min=normal, out=sizes)
    return float(torch.div(sides.e, sizes, out=sizes).abs_().amax())


def _multiply(sides: _PairBuffer, products: Tensor, workspace: Workspace) -> None:
    """Σx², Σxe and Σe² of each row into its ``products``, (r, 4), one after the other; Σex stays undefined."""
    scratch = workspace.buffer("scratch", tuple(sides.x.shape), torch.float32)
    x_sq, xe, _, e_sq = products.unbind(1)
    for a, b, out in ((sides.x, sides.x, x_sq), (sides.x, sides.e, xe), (sides.e, sides.e, e_sq)):
        torch.sum(torch.mul(a, b, out=scratch), 1, out=out)


def _multiply_at_once(sides: _PairBuffer, products: Tensor, workspace: Workspace) -> None:
    """The same at once: a segment of a row is a matrix of x and e, which is multiplied with its own transpose."""
    n, rows = sides.pieces.shape[0], products.shape[0]
    found = workspace.buffer("pieces", (n, 2, 2), torch.float32)
    torch.bmm(sides.pieces, sides.pieces.mT, out=found)
    torch.sum(workspace.buffer("pieces", (rows, n // rows, 4), torch.float32), 1, out=products)


def _gemm_is_exact() -> bool:
    """Whether a product of float32 matrices is one here: settings of torch and of libraries below it round factors."""
    pieces, expected = _probe()
    found = torch.bmm(pieces, pieces.transpose(1, 2))
    return bool(((found - expected).abs() <= GEMM_ERROR * expected).all())


@cache
def _probe() -> tuple[Tensor, Tensor]:
    """Matrices whose elements are others when rounded to fewer than 21 bits, and their products."""
    values = 1 + 2.0**-20 * torch.arange(1, 256, 2)
    pieces = values.repeat_interleave(SEGMENT).view(-1, 2, SEGMENT)
    return pieces, torch.bmm(pieces.double(), pieces.double().transpose(1, 2)).float()


def _add_up(sums: Sums, stats: Tensor, products: Tensor, weighted: bool) -> Tensor | None:
    """Sums over all rows into ``sums``; gives Σx², Σe², max |e| and Σxe of each row, (4, r) float64.

    None where float32 may have lost digits of a row, or rounded too much for the sums to be good.
    """
    x_sq, xe, _, e_sq = products.unbind(1)
    rows = torch.stack((x_sq, e_sq, stats[-2], xe)).double()
    largest = rows.amax(1).tolist()
    totals = dict(zip(ADDED, stats[: len(ADDED)].sum(1, dtype=torch.float64).tolist(), strict=True))
    totals |= zip(("x_sq", "e_sq", "e_max", "xe"), rows.sum(1).tolist(), strict=True)
    if not isfinite(totals["relative"]) or not _fits_float32(rows, largest, stats[ADDED.index("x_abs")]):
        return None
    if not _variance_is_safe(totals, sums.n) or (len(x_sq) >= LEAST_ROWS and not _no_row_dominates(totals, largest)):
        return None
    for name in ("x_sq", "e_sq", "x", "e", "x_abs", "e_abs", "relative"):
        setattr(sums, name, exact(totals[name]))
    if weighted:
        both = stats[len(ADDED) : len(ADDED) + len(WEIGHTED)].sum(1, dtype=torch.float64)
        sums.weighted_x_sq, sums.weighted_e_sq = map(exact, both.tolist())
    cross = exact(totals["xe"])
    sums.y, sums.xy, sums.y_sq = sums.x + sums.e, sums.x_sq + cross, sums.x_sq + 2 * cross + sums.e_sq
    if 100 * sums.y_sq < sums.x_sq:  # a difference of much larger sums
        return None
    sums.zeroed -= sums.n - sums.x_nonzero - sums.zero_reference  # where x is zero too
    sums.relative_outliers = int(totals["relative_outliers"]) + sums.zero_reference
    sums.x_max, sums.e_max, sums.e_min = float(stats[-3].amax()), largest[2], float(stats[-1].amin())
    return rows


def _zeroed_rows(load: Load, chunks: Sequence[Chunk], rows: Tensor) -> Tensor:
    """Which rows of y are zero, (1, r) of 0 and 1, for the ``rows`` of :func:`_add_up`, on the CPU.

    Sums cannot prove it: a y that drowns in the roundings of x looks the same. So the few chunks in which y has next to
    no energy are loaded again.
    """
    x_sq, e_sq, _, xe = rows
    y_sq = x_sq + 2 * xe + e_sq
    zeroed: Tensor = y_sq <= NO_ENERGY * x_sq
    for chunk, own, in_x in zip(chunks, *(v.split([c.shape[0] for c in chunks]) for v in (zeroed, x_sq)), strict=True):
        if bool((own & (in_x > 0)).any()):
            own &= (load(chunk)[1] == 0).all(1).cpu()
    return zeroed[None].double()


def _fits_float32(rows: Tensor, largest: Sequence[float], x_abs: Tensor) -> bool:
    """Whether float32 could hold the squares in all rows: Σx², Σe², max |e|, …, (4, r); Σ|x|, (r,)."""
    if not (largest[0] <= HIGH and largest[1] <= HIGH):
        return False
    x_sq, e_sq, e_max, _ = rows
    if float(rows[:2].amin()) >= LOW:
        return True
    # A row of zeros is as in range as one can be.
    return bool((((x_sq >= LOW) | (x_abs == 0)) & ((e_sq >= LOW) | (e_max == 0))).all())


def _variance_is_safe(totals: Mapping[str, float], n: int) -> bool:
    """Whether x and |e| vary enough for their variances to be differences of float32 sums (y: almost x)."""
    return all(
        totals[total] ** 2 <= (1 - SPREAD) * n * totals[energy]
        for total, energy in (("x", "x_sq"), ("e_abs", "e_sq"))
        if totals[energy]
    )


def _no_row_dominates(totals: Mapping[str, float], largest: Sequence[float]) -> bool:
    """Whether no row has so much of the energy that its own roundings are those of the whole."""
    return LEAST_ROWS * largest[0] <= totals["x_sq"] and LEAST_ROWS * largest[1] <= totals["e_sq"]


def exact_sums(load: Load, chunks: Sequence[Chunk], cols: int, outlier: float, wanted: Wanted = SUMS_ALONE) -> Sums:
    """Sums of a few chunks of one weight in float64, whatever the values are: the specification.

    Elements that are not finite on either side are counted and left out of everything else.
    """
    return Sums.merged(_exact_chunk(*load(chunk), chunk, cols, outlier, wanted) for chunk in chunks)


def _exact_chunk(
    x: Tensor,
    y: Tensor,
    _: Tensor | None,
    chunk: Chunk,
    cols: int,
    outlier: float,
    wanted: Wanted,
) -> Sums:
    x, y = x.double(), y.double()
    finite_x, finite_y = x.isfinite(), y.isfinite()
    both = finite_x & finite_y
    x, y = x.where(both, 0.0), y.where(both, 0.0)
    e = y - x
    e_abs, x_abs = e.abs(), x.abs()
    nonzero = x != 0
    relative = (e_abs / x_abs).where(nonzero, 0.0)
    magnitudes = e_abs[both]
    zeroed = (y == 0).all(1).double()
    rows = torch.stack([(x * x).sum(1), (e * e).sum(1), e_abs.amax(1), (x * e).sum(1), zeroed]).cpu()
    sums = Sums(
        elements=chunk.n,
        n=len(magnitudes),
        nonfinite_original=int((~finite_x).sum()),
        nonfinite_quantized=int((~finite_y).sum()),
        x_nonzero=int(nonzero.sum()),
        zero_reference=int((~nonzero & (y != 0)).sum()),
        zeroed=int((nonzero & (y == 0)).sum()),
        outliers=int((e_abs > outlier).sum()),
        relative_outliers=int((e_abs > RELATIVE_OUTLIER * x_abs).sum()),
        x=exact(float(x.sum())),
        y=exact(float(y.sum())),
        e=exact(float(e.sum())),
        x_abs=exact(float(x_abs.sum())),
        e_abs=exact(float(e_abs.sum())),
        x_sq=exact(float(rows[0].sum())),
        y_sq=exact(float((y * y).sum())),
        e_sq=exact(float(rows[1].sum())),
        xy=exact(float((x * y).sum())),
        relative=exact(float(relative.sum())),
        e_max=float(rows[2].amax()),
        e_min=float(magnitudes.amin()) if len(magnitudes) else inf,
        relative_max=float(relative.amax()),
        x_max=float(x_abs.amax()),
        histogram=Histogram.of(magnitudes) if len(magnitudes) else None,
    )
    if wanted.normal:
        sums.cast_max = float((e_abs / x_abs.clamp(min=wanted.normal)).amax())
    if wanted.cells and _are_whole([chunk], cols):
        sums.peaks = [wanted.cells.piece(windows_of(torch.stack((x_abs, e_abs)).float()), chunk.row)]
    if wanted.importance:
        columns = wanted.importance(chunk).to(x.device).double()
        sums.weighted_x_sq = exact(float((x * x * columns).sum()))
        sums.weighted_e_sq = exact(float((e * e * columns).sum()))
    _add_rows(sums, [chunk], cols, rows)
    if wanted.matrix_rows:
        add_matrices(sums, [chunk], wanted.matrix_rows, rows)
    return sums


def _add_rows(sums: Sums, chunks: Sequence[Chunk], cols: int, rows: Tensor) -> None:
    """The row with the largest |e|, and the few with the lowest SNR; pieces of rows are all kept.

    ``rows``, (5, r) float64 on the CPU, are Σx², Σe², max |e|, Σxe and whether y is zero, of each row, in order.
    """
    whole = chunks[0].stop_col - chunks[0].col == cols
    if whole and not sums.e_max:
        return
    if whole:
        sums.dead_rows = int(((rows[4] > 0) & (rows[0] > 0)).sum())
    numbers = [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)]
    if sums.e_max:
        worst = int(rows[2].argmax())
        sums.worst = WorstRow(sums.e_max, numbers[worst], 0 if whole else chunks[worst].col)
    picked = _worst_places(rows) if whole else torch.arange(len(numbers))
    for place, (x_sq, e_sq, e_max, _, zeroed) in zip(picked.tolist(), rows[:, picked].t().tolist(), strict=True):
        row = RowSums(exact(x_sq), exact(e_sq), e_max, whole, bool(zeroed))
        before = sums.rows.get(numbers[place])
        sums.rows[numbers[place]] = before.joined(row) if before else row


def add_matrices(sums: Sums, chunks: Sequence[Chunk], matrix_rows: int, rows: Tensor) -> None:
    """Energies and the largest |e| of each matrix of a stack; ``rows`` are those of :func:`_add_rows`."""
    numbers = torch.cat([torch.arange(chunk.row, chunk.stop_row) for chunk in chunks]) // matrix_rows
    for number in sorted(set(numbers.tolist())):
        own = rows[:, numbers == number]
        x_sq, e_sq = own[:2].sum(1).tolist()
        sums.matrices[number] = RowSums(exact(x_sq), exact(e_sq), float(own[2].amax()), False)


def _worst_places(rows: Tensor) -> Tensor:
    """Which of the rows have the lowest SNR; of equal ones the first."""
    ratio = (rows[1] / rows[0]).nan_to_num(nan=0.0, posinf=inf)
    if ratio.numel() <= FEW_ROWS:
        return ratio.sort(descending=True, stable=True).indices[:KEPT_ROWS]
    least = ratio.topk(KEPT_ROWS).values[-1]
    candidates = (ratio >= least).nonzero().view(-1)  # topk itself says nothing of ties
    return candidates[ratio[candidates].sort(descending=True, stable=True).indices[:KEPT_ROWS]]
