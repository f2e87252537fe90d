"""The back end in torch: it reads two weights chunk by chunk and computes all sums in one pass.

:func:`fast_sums` uses float32 along rows and float64 across rows. It returns None for values out of range: not finite,
or so large or small that float32 squares overflow or lose digits. The float32 sum of a row, added in pairs or short
segments, has a relative error of 5e-8 (root mean square; at most 2e-7). Sums over many rows, none of which dominates,
are good to 1e-8, or to 5e-8 if all elements are alike.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.kernel.specification import (
    SUMS_ALONE,
    Load,
    SumOptions,
    add_matrices,
    add_rows,
    are_whole,
    find_window_maxima,
    view_bits,
)
from quanterr.metrics import RELATIVE_OUTLIER
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.sums import Sums, exact
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# Range of a row's energy in which float32 is trusted. Outside, squares of single elements overflow, or so many of them
# vanish that it matters.
LOW, HIGH = 2.0**-100, 2.0**100

# Least share of the energy that a variance must have to be more than the rounding of the sums.
SPREAD = 0.01

LEAST_ROWS = 16  # least number of rows in a sum, so that their roundings average out

LARGE = 1 << 17  # elements of a range of chunks from which a matrix product pays off
SEGMENT = 128  # elements of a row that are summed sequentially
GEMM_ERROR = 3e-7  # largest relative error of an exact float32 product; TF32 factors give 2e-4

NO_ENERGY = 1e-5  # if y is zero, Σy² / Σx² from float32 sums is below this, as their rounding is smaller

# Fields that fast_sums keeps per row, in a (fields, rows) matrix, besides Σx², Σxe, Σex and Σe², (rows, 4).
ADDED = ("x", "e", "x_abs", "e_abs", "relative", "relative_outliers")
WEIGHTED = ("weighted_x_sq", "weighted_e_sq")  # undefined without importance
EXTREME = ("x_max", "e_max", "e_min")


def fast_sums(
    load: Load,
    chunks: Sequence[Chunk],
    matrix: tuple[int, int],
    workspace: Workspace,
    outlier: float,
    wanted: SumOptions = SUMS_ALONE,
) -> Sums | None:
    """Compute the sums of a few chunks of one weight in float32; None if this requires :func:`exact_sums`.

    ``matrix`` is (rows, cols) of the whole weight. Results for single rows are computed once for all chunks: per chunk,
    they would cost more than the arithmetic.
    """
    if matrix[0] < LEAST_ROWS:
        return None
    n = sum(chunk.n for chunk in chunks)
    heights = tuple(chunk.shape[0] for chunk in chunks)
    if ("rooms", heights) not in workspace.views:
        workspace.views["rooms", heights] = _make_row_buffers(heights, workspace)
    stats, products, rooms = workspace.views["rooms", heights]
    in_segments = all(chunk.shape[1] % SEGMENT == 0 for chunk in chunks)
    by_gemm = n >= LARGE and in_segments and workspace.device.type == "cpu" and _gemm_is_exact()
    multiply = _multiply_at_once if by_gemm else _multiply
    sums = Sums(elements=n, n=n, x_nonzero=n)
    cells = wanted.cells if are_whole(chunks, matrix[1]) else None
    windows: list[Tensor] | None = [] if cells and cells.cols < matrix[1] else None
    for chunk, room in zip(chunks, rooms, strict=True):
        x, y, y_zeros = load(chunk)
        if y_zeros is None:
            y_zeros = torch.eq(y, 0, out=workspace.buffer("scratch", chunk.shape, torch.float32)).sum()
        sums.zeroed += int(y_zeros)
        sides = _join_sides(x, y, workspace, by_gemm)
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
            sums.cast_max = max(sums.cast_max, _find_cast_max(sides, wanted.normal, workspace))
        if not _add_chunk(sides, room, windows, workspace, outlier, sums):
            return None

    rows = _add_up(sums, stats, products, weighted=wanted.importance is not None)
    if rows is None:
        return None
    rows = rows.cpu()
    rows = torch.vstack((rows, _find_zeroed_rows(load, chunks, rows)))
    add_rows(sums, chunks, matrix[1], rows)
    if wanted.matrix_rows:
        add_matrices(sums, chunks, wanted.matrix_rows, rows)
    if cells:
        of_rows = stats[-3:-1, :, None] if windows is None else torch.cat(windows, 1)
        sums.peaks = [cells.reduce(of_rows, chunks[0].row)]
    return sums


class _RowBuffers(NamedTuple):
    """Output views for the sums and extremes of one chunk's rows, into buffers shared by all chunks."""

    sums: Tensor  # (2, r): Σx and Σe
    magnitudes: Tensor  # (2, r): Σ|x| and Σ|e|
    relative: Tensor  # (r,)
    relative_outliers: Tensor
    weighted: Tensor  # (2, r): Σ importance · x² and Σ importance · e²
    x_max: Tensor
    e_max: Tensor
    e_min: Tensor
    products: Tensor  # (r, 4): Σx², Σxe, Σex and Σe²


def _make_row_buffers(heights: tuple[int, ...], workspace: Workspace) -> tuple[Tensor, Tensor, list[_RowBuffers]]:
    """Make ``stats``, (fields, rows), ``products``, (rows, 4), and the views of each chunk of these heights."""
    stats = workspace.buffer("rows", (len(ADDED) + len(WEIGHTED) + len(EXTREME), sum(heights)), torch.float32)
    products = workspace.buffer("products", (sum(heights), 4), torch.float32)
    sizes = list(heights)
    parts = zip(torch.split(stats, sizes, 1), torch.split(products, sizes), strict=True)
    return stats, products, [_RowBuffers(s[:2], s[2:4], s[4], s[5], s[6:8], s[8], s[9], s[10], p) for s, p in parts]


class _PairBuffer(NamedTuple):
    """x and y of a chunk, (r, c), as one tensor, so that one operation serves both; y is overwritten by e."""

    given: tuple[Tensor, Tensor]
    both: Tensor  # (2, r, c)
    x: Tensor
    e: Tensor
    copied: bool  # whether x and y are copied into ``both``, as they are not adjacent in memory
    pieces: Tensor  # (n, 2, SEGMENT): segments of x and e; empty if they are not multiplied by a matrix product


def _join_sides(x: Tensor, y: Tensor, workspace: Workspace, in_pieces: bool) -> _PairBuffer:
    """Return x and y as one tensor; its views are cached, as consecutive chunks mostly use the same buffers."""
    key = "sides", x.shape, in_pieces
    sides: _PairBuffer | None = workspace.views.get(key)
    if sides is None or sides.given[0] is not x or sides.given[1] is not y:
        sides = _make_pair_buffer(x, y, workspace, in_pieces)
        workspace.views[key] = sides
    if sides.copied:
        sides.x.copy_(x)
        sides.e.copy_(y)
    return sides


def _make_pair_buffer(x: Tensor, y: Tensor, workspace: Workspace, in_pieces: bool) -> _PairBuffer:
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
    """Add one chunk to the sums, histogram, counts and ``windows``; return False if it is out of range.

    ``sides`` holds x and e, then |x| and |e|, then |x| and |e| / |x|: computed in place, so that they stay in a core's
    cache, and with few operations, as threads wait for each other whenever they return to the interpreter.
    """
    x, e = sides.x, sides.e
    torch.sum(sides.both, 2, out=room.sums)
    torch.sum(sides.both.abs_(), 2, out=room.magnitudes)
    if windows is None:
        torch.amax(view_bits(x), 1, out=view_bits(room.x_max))
        torch.amax(view_bits(e), 1, out=view_bits(room.e_max))
    else:
        windows.append(find_window_maxima(sides.both))
        torch.amax(windows[-1][0], 1, out=room.x_max)
        torch.amax(windows[-1][1], 1, out=room.e_max)
    largest = float(room.e_max.amax())
    if not isfinite(largest):
        return False
    torch.amin(view_bits(e), 1, out=view_bits(room.e_min))
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
    if not isfinite(relative_max):  # x = 0 gives infinity, or NaN if y = 0 too
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


def _find_cast_max(sides: _PairBuffer, normal: float, workspace: Workspace) -> float:
    """Return the largest |e| / max(|x|, normal)."""
    sizes = workspace.buffer("scratch", tuple(sides.x.shape), torch.float32)
    torch.clamp(torch.abs(sides.x, out=sizes), min=normal, out=sizes)
    return float(torch.div(sides.e, sizes, out=sizes).abs_().amax())


def _multiply(sides: _PairBuffer, products: Tensor, workspace: Workspace) -> None:
    """Compute Σx², Σxe and Σe² of each row into ``products``, (r, 4), separately; Σex stays undefined."""
    scratch = workspace.buffer("scratch", tuple(sides.x.shape), torch.float32)
    x_sq, xe, _, e_sq = products.unbind(1)
    for a, b, out in ((sides.x, sides.x, x_sq), (sides.x, sides.e, xe), (sides.e, sides.e, e_sq)):
        torch.sum(torch.mul(a, b, out=scratch), 1, out=out)


def _multiply_at_once(sides: _PairBuffer, products: Tensor, workspace: Workspace) -> None:
    """Compute ``products`` by one matrix product: each segment of a row, [x; e], times its own transpose."""
    n, rows = sides.pieces.shape[0], products.shape[0]
    found = workspace.buffer("pieces", (n, 2, 2), torch.float32)
    torch.bmm(sides.pieces, sides.pieces.mT, out=found)
    torch.sum(workspace.buffer("pieces", (rows, n // rows, 4), torch.float32), 1, out=products)


def _gemm_is_exact() -> bool:
    """Return whether float32 matrix products are exact here: settings of torch and its libraries may round factors."""
    pieces, expected = _make_probe()
    found = torch.bmm(pieces, pieces.transpose(1, 2))
    return bool(((found - expected).abs() <= GEMM_ERROR * expected).all())


@cache
def _make_probe() -> tuple[Tensor, Tensor]:
    """Return matrices whose elements change if they are rounded to fewer than 21 bits, and their exact products."""
    values = 1 + 2.0**-20 * torch.arange(1, 256, 2)
    pieces = values.repeat_interleave(SEGMENT).view(-1, 2, SEGMENT)
    return pieces, torch.bmm(pieces.double(), pieces.double().transpose(1, 2)).float()


def _add_up(sums: Sums, stats: Tensor, products: Tensor, weighted: bool) -> Tensor | None:
    """Add up all rows into ``sums``; return Σx², Σe², max |e| and Σxe of each row, (4, r) float64.

    Return None if float32 may have lost digits of a row, or rounded too much for accurate sums.
    """
    x_sq, xe, _, e_sq = products.unbind(1)
    rows = torch.stack((x_sq, e_sq, stats[-2], xe)).double()
    largest = rows.amax(1).tolist()
    totals = dict(zip(ADDED, stats[: len(ADDED)].sum(1, dtype=torch.float64).tolist(), strict=True))
    totals |= zip(("x_sq", "e_sq", "e_max", "xe"), rows.sum(1).tolist(), strict=True)
    if not isfinite(totals["relative"]) or not _fits_float32(rows, largest, stats[ADDED.index("x_abs")]):
        return None
    # No row may have so much of the energy that its rounding dominates the total.
    is_spread = LEAST_ROWS * largest[0] <= totals["x_sq"] and LEAST_ROWS * largest[1] <= totals["e_sq"]
    if not _variance_is_safe(totals, sums.n) or (len(x_sq) >= LEAST_ROWS and not is_spread):
        return None
    for name in ("x_sq", "e_sq", "x", "e", "x_abs", "e_abs", "relative"):
        setattr(sums, name, exact(totals[name]))
    if weighted:
        both = stats[len(ADDED) : len(ADDED) + len(WEIGHTED)].sum(1, dtype=torch.float64)
        sums.weighted_x_sq, sums.weighted_e_sq = map(exact, both.tolist())
    cross = exact(totals["xe"])
    sums.y, sums.xy, sums.y_sq = sums.x + sums.e, sums.x_sq + cross, sums.x_sq + 2 * cross + sums.e_sq
    if 100 * sums.y_sq < sums.x_sq:  # y_sq is a small difference of much larger sums
        return None
    sums.zeroed -= sums.n - sums.x_nonzero - sums.zero_reference  # do not count elements where x is zero too
    sums.relative_outliers = int(totals["relative_outliers"]) + sums.zero_reference
    sums.x_max, sums.e_max, sums.e_min = float(stats[-3].amax()), largest[2], float(stats[-1].amin())
    return rows


def _find_zeroed_rows(load: Load, chunks: Sequence[Chunk], rows: Tensor) -> Tensor:
    """Return which rows of y are zero, (1, r) of 0 and 1; ``rows`` is the result of :func:`_add_up`, on the CPU.

    Sums cannot prove it, as a tiny y is lost in the rounding of x. The few chunks with rows in which y has almost no
    energy are therefore loaded again.
    """
    x_sq, e_sq, _, xe = rows
    y_sq = x_sq + 2 * xe + e_sq
    zeroed: Tensor = y_sq <= NO_ENERGY * x_sq
    for chunk, own, in_x in zip(chunks, *(v.split([c.shape[0] for c in chunks]) for v in (zeroed, x_sq)), strict=True):
        if bool((own & (in_x > 0)).any()):
            own &= (load(chunk)[1] == 0).all(1).cpu()
    return zeroed[None].double()


def _fits_float32(rows: Tensor, largest: Sequence[float], x_abs: Tensor) -> bool:
    """Return whether the squares in all rows are in the range of float32.

    ``rows`` is Σx², Σe², max |e| and Σxe, (4, r); ``x_abs`` is Σ|x|, (r,).
    """
    if not (largest[0] <= HIGH and largest[1] <= HIGH):
        return False
    x_sq, e_sq, e_max, _ = rows
    if float(rows[:2].amin()) >= LOW:
        return True
    # A row of zeros is in range too.
    return bool((((x_sq >= LOW) | (x_abs == 0)) & ((e_sq >= LOW) | (e_max == 0))).all())


def _variance_is_safe(totals: Mapping[str, float], n: int) -> bool:
    """Return whether x and |e| vary enough to compute their variances from float32 sums (y varies about as x)."""
    return all(
        totals[total] ** 2 <= (1 - SPREAD) * n * totals[energy]
        for total, energy in (("x", "x_sq"), ("e_abs", "e_sq"))
        if totals[energy]
    )
