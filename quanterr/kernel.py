"""The one hot loop: two weights in, chunk by chunk, sums out, in one pass.

There are two ways. :func:`exact_sums` is the specification: float64 throughout, every mask written
out. :func:`fast_sums` is float32 along rows, added up in float64, and declines (None) whatever is not
tame: values that are not finite, so large or so small that float32 squares overflow or lose digits.
A row's sum in float32, which torch adds pairwise, is off by 5e-8 of itself (root mean square; at most 2e-7);
sums over many rows, of which none is most of the whole, are good to 1e-8.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from quanterr.chunks import Chunk
from quanterr.histogram import Histogram
from quanterr.metrics import RELATIVE_OUTLIER
from quanterr.metrics.sums import KEPT_ROWS, RowSums, Sums, WorstRow, exact
from quanterr.tensors import Workspace

# x and y of a chunk, (r, c), which may be overwritten, and how many zeros y has, where that is known
Load = Callable[[Chunk], tuple[Tensor, Tensor, Tensor | None]]

Importance = Callable[[Chunk], Tensor]  # of the elements of a chunk, (1 or r, c) float32

# Energies of a row between which float32 is trusted: beyond, squares of single elements overflow, or
# vanish in amounts that could be seen.
LOW, HIGH = 2.0**-100, 2.0**100

# A variance must be this share of the energy, or it drowns in the rounding of the sums it is made from.
SPREAD = 0.01

LEAST_ROWS = 16  # that make up a sum, for the roundings of each to average out

FEW_ROWS = 1 << 12  # that are sorted as a whole sooner than searched

# What fast_sums keeps of every row, as rows of a (fields, rows) matrix.
ADDED = ("x_sq", "e_sq", "xe", "x", "e", "x_abs", "e_abs", "relative", "relative_outliers")
EXTREME = ("e_max", "e_min")


def fast_sums(
    load: Load,
    chunks: Sequence[Chunk],
    matrix: tuple[int, int],
    workspace: Workspace,
    outlier: float,
    importance: Importance | None = None,
    matrix_rows: int = 0,
) -> Sums | None:
    """Sums of a few chunks of one weight in float32; None if only :func:`exact_sums` can tell.

    ``matrix`` is (rows, cols) of the whole weight, ``matrix_rows`` the rows of each matrix where it is a stack of
    them. What is told of single rows is worked out once for
    all chunks: on its own it would cost more than the arithmetic.
    """
    n_rows, n = sum(chunk.shape[0] for chunk in chunks), sum(chunk.n for chunk in chunks)
    if matrix[0] < LEAST_ROWS:
        return None
    stats = workspace.buffer("rows", (len(ADDED) + len(EXTREME), n_rows), torch.float32)
    bins = workspace.buffer("bins", (n,), torch.bfloat16)
    weighted = workspace.buffer("weighted", (2, n_rows if importance else 0), torch.float32)
    sums = Sums(elements=n, n=n, x_nonzero=n)
    row = element = 0
    for chunk in chunks:
        r = chunk.shape[0]
        x, y, y_zeros = load(chunk)
        places = stats[:, row : row + r], bins[element : element + chunk.n]
        if not _add_chunk(x, y, y_zeros, *places, workspace, outlier, sums):
            return None
        if importance:  # the squares of both are left where x and y were
            columns = importance(chunk).to(x.device)
            torch.sum(x.mul_(columns), 1, out=weighted[0, row : row + r])
            torch.sum(y.mul_(columns), 1, out=weighted[1, row : row + r])
        row, element = row + r, element + chunk.n

    x_sq, e_sq, e_max, e_min = stats[0], stats[1], stats[-2], stats[-1]
    largest = float(e_max.amax())
    totals = dict(zip(ADDED, stats[: len(ADDED)].sum(1, dtype=torch.float64).tolist(), strict=True))
    if not isfinite(totals["relative"]) or not _tame(x_sq, e_sq, stats[ADDED.index("x_abs")], e_max):
        return None
    if not _spread(totals, n) or (n_rows >= LEAST_ROWS and not _even(totals, stats)):
        return None
    for name in ("x_sq", "e_sq", "x", "e", "x_abs", "e_abs", "relative"):
        setattr(sums, name, exact(totals[name]))
    if importance:
        sums.weighted_x_sq, sums.weighted_e_sq = map(exact, weighted.sum(1, dtype=torch.float64).tolist())
    xe = exact(totals["xe"])
    sums.y, sums.xy, sums.y_sq = sums.x + sums.e, sums.x_sq + xe, sums.x_sq + 2 * xe + sums.e_sq
    if 100 * sums.y_sq < sums.x_sq:  # a difference of much larger sums
        return None
    sums.zeroed -= n - sums.x_nonzero - sums.zero_reference  # where x is zero too
    sums.relative_outliers = int(totals["relative_outliers"]) + sums.zero_reference
    sums.e_max, sums.e_min = largest, float(e_min.amin())
    sums.histogram = Histogram.of_bits(bins.view(torch.int16))
    told_of_rows = x_sq.double(), e_sq.double(), e_max
    _add_rows(sums, chunks, matrix[1], *told_of_rows)
    if matrix_rows:
        _add_matrices(sums, chunks, matrix_rows, *told_of_rows)
    return sums


def _add_chunk(
    x: Tensor,
    y: Tensor,
    y_zeros: Tensor | None,
    stats: Tensor,
    bins: Tensor,
    workspace: Workspace,
    outlier: float,
    sums: Sums,
) -> bool:
    """One chunk's part of ``stats``, (fields, r), ``bins`` and counts; whether it is tame.

    Some twenty operations, in place wherever the next one allows, on three buffers: x (then |x|, x²),
    y (then e, e²) and a third (x e, then |e|, then |e| / |x|); the squares stay in the first two.
    An operation that writes elsewhere costs twice as much.
    """
    x_sq, e_sq, xe, x_sum, e_sum, x_abs_sum, e_abs_sum, relative_sum, relative_outliers, e_max, e_min = stats
    third = workspace.buffer("third", tuple(x.shape), torch.float32)
    y_is_zero = torch.eq(y, 0, out=third).sum() if y_zeros is None else y_zeros
    sums.zeroed += int(y_is_zero)

    e = y.sub_(x)
    torch.sum(torch.mul(x, e, out=third), 1, out=xe)
    e_abs = torch.abs(e, out=third)
    torch.amax(e_abs, 1, out=e_max)
    largest = float(e_max.amax())
    if not isfinite(largest):
        return False
    torch.amin(e_abs, 1, out=e_min)
    torch.sum(e_abs, 1, out=e_abs_sum)
    bins.view(x.shape).copy_(e_abs)
    if largest > outlier:
        sums.outliers += int(
            torch.gt(e_abs, outlier, out=workspace.buffer("fourth", tuple(x.shape), torch.float32)).sum()
        )

    torch.sum(x, 1, out=x_sum)
    torch.sum(e, 1, out=e_sum)
    torch.sum(e.mul_(e), 1, out=e_sq)

    relative = e_abs.div_(x.abs_())
    torch.sum(x, 1, out=x_abs_sum)
    relative_max = float(relative.amax())
    if not isfinite(relative_max):  # where x = 0: infinity, or NaN where y = 0 too
        zeros = x.eq(0)
        sums.x_nonzero -= int(zeros.sum())
        sums.zero_reference += int((zeros & relative.isinf()).sum())
        relative_max = float(relative.masked_fill_(zeros, 0).amax())
        if not isfinite(relative_max):
            return False
    sums.relative_max = max(sums.relative_max, relative_max)
    torch.sum(relative, 1, out=relative_sum)
    torch.sum(relative.gt_(RELATIVE_OUTLIER), 1, out=relative_outliers)
    torch.sum(x.mul_(x), 1, out=x_sq)
    return True


def _tame(x_sq: Tensor, e_sq: Tensor, x_abs: Tensor, e_max: Tensor) -> bool:
    """Whether float32 could hold the squares in all rows, told from the rows' energies and magnitudes, (r,) each."""
    if not float(torch.maximum(x_sq, e_sq).amax()) <= HIGH:
        return False
    if float(torch.minimum(x_sq, e_sq).amin()) >= LOW:
        return True
    # A row of zeros is as tame as one can be.
    return bool((((x_sq >= LOW) | (x_abs == 0)) & ((e_sq >= LOW) | (e_max == 0))).all())


def _spread(totals: Mapping[str, float], n: int) -> bool:
    """Whether x and |e| vary enough for their variances to be differences of float32 sums (y: almost x)."""
    return all(
        totals[total] ** 2 <= (1 - SPREAD) * n * totals[energy]
        for total, energy in (("x", "x_sq"), ("e_abs", "e_sq"))
        if totals[energy]
    )


def _even(totals: Mapping[str, float], stats: Tensor) -> bool:
    """Whether no row has so much of the energy that its own roundings are those of the whole."""
    return all(
        LEAST_ROWS * largest <= totals[energy]
        for energy, largest in zip(ADDED[:2], stats[:2].amax(1).tolist(), strict=True)
    )


def exact_sums(
    load: Load,
    chunks: Sequence[Chunk],
    cols: int,
    outlier: float,
    importance: Importance | None = None,
    matrix_rows: int = 0,
) -> Sums:
    """Sums of a few chunks of one weight in float64, whatever the values are: the specification.

    Elements that are not finite on either side are counted and left out of everything else.
    """
    return Sums.merged(_exact_chunk(*load(chunk), chunk, cols, outlier, importance, matrix_rows) for chunk in chunks)


def _exact_chunk(
    x: Tensor,
    y: Tensor,
    _: Tensor | None,
    chunk: Chunk,
    cols: int,
    outlier: float,
    importance: Importance | None,
    matrix_rows: int,
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
    row_x_sq, row_e_sq, row_e_max = (x * x).sum(1), (e * e).sum(1), e_abs.amax(1)
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
        x_sq=exact(float(row_x_sq.sum())),
        y_sq=exact(float((y * y).sum())),
        e_sq=exact(float(row_e_sq.sum())),
        xy=exact(float((x * y).sum())),
        relative=exact(float(relative.sum())),
        e_max=float(row_e_max.amax()),
        e_min=float(magnitudes.amin()) if len(magnitudes) else inf,
        relative_max=float(relative.amax()),
        histogram=Histogram.of(magnitudes) if len(magnitudes) else None,
    )
    if importance:
        columns = importance(chunk).to(x.device).double()
        sums.weighted_x_sq = exact(float((x * x * columns).sum()))
        sums.weighted_e_sq = exact(float((e * e * columns).sum()))
    _add_rows(sums, [chunk], cols, row_x_sq, row_e_sq, row_e_max)
    if matrix_rows:
        _add_matrices(sums, [chunk], matrix_rows, row_x_sq, row_e_sq, row_e_max)
    return sums


def _add_rows(sums: Sums, chunks: Sequence[Chunk], cols: int, x_sq: Tensor, e_sq: Tensor, e_max: Tensor) -> None:
    """The row with the largest |e|, and the few with the lowest SNR; pieces of rows are all kept.

    ``x_sq``, ``e_sq`` (float64) and ``e_max`` are (r,): a number for each row of the chunks, in order.
    """
    whole = chunks[0].stop_col - chunks[0].col == cols
    if whole and not sums.e_max:
        return
    numbers = [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)]
    if sums.e_max:
        worst = int(e_max.argmax())
        sums.worst = WorstRow(sums.e_max, numbers[worst], 0 if whole else chunks[worst].col)
    picked = _worst_places(x_sq, e_sq) if whole else torch.arange(len(e_sq))
    columns = torch.stack([x_sq.cpu()[picked], e_sq.cpu()[picked], e_max.double().cpu()[picked]]).tolist()
    for place, row_x_sq, row_e_sq, row_e_max in zip(picked.tolist(), *columns, strict=True):
        row = RowSums(exact(row_x_sq), exact(row_e_sq), row_e_max, whole)
        before = sums.rows.get(numbers[place])
        sums.rows[numbers[place]] = before.joined(row) if before else row


def _add_matrices(
    sums: Sums, chunks: Sequence[Chunk], matrix_rows: int, x_sq: Tensor, e_sq: Tensor, e_max: Tensor
) -> None:
    """Energies and the largest |e| of each matrix of a stack; the arguments are those of :func:`_add_rows`."""
    rows = [torch.arange(chunk.row, chunk.stop_row, device=x_sq.device) for chunk in chunks]
    numbers = torch.cat(rows) // matrix_rows
    for number in sorted(set(numbers.tolist())):
        own = numbers == number
        energies = exact(float(x_sq[own].sum())), exact(float(e_sq[own].sum()))
        sums.matrices[number] = RowSums(*energies, float(e_max[own].amax()), False)


def _worst_places(x_sq: Tensor, e_sq: Tensor) -> Tensor:
    """Which of the rows, (r,), have the lowest SNR, on the CPU; of equal ones the first."""
    ratio = (e_sq / x_sq).nan_to_num(nan=0.0, posinf=inf).cpu()
    if len(ratio) <= FEW_ROWS:
        return ratio.sort(descending=True, stable=True).indices[:KEPT_ROWS]
    least = ratio.topk(KEPT_ROWS).values[-1]
    candidates = (ratio >= least).nonzero().view(-1)  # topk itself says nothing of ties
    return candidates[ratio[candidates].sort(descending=True, stable=True).indices[:KEPT_ROWS]]
