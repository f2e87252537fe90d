"""The specification of the sums of two weights, in float64, which also computes them if there is no kernel.

native_sums.py computes the sums with the compiled kernel.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics import RELATIVE_OUTLIER
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.peaks import WINDOW, CellGrid
from quanterr.metrics.sums import KEPT_ROWS, RowSums, Sums, WorstPlace, exact
from quanterr.tensors.chunks import Chunk

MAX_SORTED_ROWS = 1 << 12  # up to this number of rows, a full sort is faster than topk

Load = Callable[[Chunk], tuple[Tensor, Tensor]]  # chunk → x and y, (r, c)

Importance = Callable[[Chunk], Tensor]  # chunk → importance of its elements, (1 or r, c) float32


class SumOptions(NamedTuple):
    """Optional quantities to compute besides the basic sums."""

    importance: Importance | None = None
    matrix_rows: int = 0  # rows of each matrix in a stack; 0 for a single matrix
    cells: CellGrid | None = None  # grid of cells for which peaks are computed
    normal: float = 0.0  # smallest normal number of a cast's dtype, for ``cast_max``; 0: not computed


SUMS_ALONE = SumOptions()


def exact_sums(load: Load, chunks: Sequence[Chunk], cols: int, outlier: float, wanted: SumOptions = SUMS_ALONE) -> Sums:
    """Compute the sums of a few chunks of one weight in float64, for any values.

    Elements that are not finite on either side are counted, and left out of all sums.
    """
    return Sums.merge(_sum_chunk_exactly(*load(chunk), chunk, cols, outlier, wanted) for chunk in chunks)


def _sum_chunk_exactly(
    x: Tensor,
    y: Tensor,
    chunk: Chunk,
    cols: int,
    outlier: float,
    wanted: SumOptions,
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
    if wanted.cells and are_whole([chunk], cols):
        sums.peaks = [wanted.cells.reduce(find_window_maxima(torch.stack((x_abs, e_abs)).float()), chunk.row)]
    if wanted.importance:
        columns = wanted.importance(chunk).to(x.device).double()
        sums.weighted_x_sq = exact(float((x * x * columns).sum()))
        sums.weighted_e_sq = exact(float((e * e * columns).sum()))
    add_rows(sums, [chunk], cols, rows)
    if wanted.matrix_rows:
        add_matrices(sums, [chunk], wanted.matrix_rows, rows)
    return sums


def add_rows(sums: Sums, chunks: Sequence[Chunk], cols: int, rows: Tensor) -> None:
    """Add the row with the largest |e| and the few rows with the lowest SNR; parts of rows are all kept.

    ``rows``, (5, r) float64 on the CPU, has Σx², Σe², max |e|, Σxe and whether y is zero, for each row in order.
    """
    whole = chunks[0].stop_col - chunks[0].col == cols
    if whole and not sums.e_max:
        return
    if whole:
        sums.dead_rows = int(((rows[4] > 0) & (rows[0] > 0)).sum())
    numbers = [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)]
    if sums.e_max:
        worst = int(rows[2].argmax())
        sums.worst = WorstPlace(sums.e_max, numbers[worst], 0 if whole else chunks[worst].col)
    picked = _find_worst_rows(rows) if whole else torch.arange(len(numbers))
    for place, (x_sq, e_sq, e_max, _, zeroed) in zip(picked.tolist(), rows[:, picked].t().tolist(), strict=True):
        row = RowSums.from_energies(x_sq, e_sq, e_max, whole, bool(zeroed))
        before = sums.rows.get(numbers[place])
        sums.rows[numbers[place]] = before.join(row) if before else row


def add_matrices(sums: Sums, chunks: Sequence[Chunk], matrix_rows: int, rows: Tensor) -> None:
    """Add the energies and the largest |e| of each matrix in a stack; ``rows`` is as in :func:`add_rows`."""
    numbers = torch.cat([torch.arange(chunk.row, chunk.stop_row) for chunk in chunks]) // matrix_rows
    for number in sorted(set(numbers.tolist())):
        matrix = rows[:, numbers == number]
        x_sq, e_sq = matrix[:2].sum(1).tolist()
        sums.matrices[number] = RowSums.from_energies(x_sq, e_sq, float(matrix[2].amax()), False)


def _find_worst_rows(rows: Tensor) -> Tensor:
    """Return the indices of the rows with the lowest SNR, the worst first; ties are in row order."""
    ratio = (rows[1] / rows[0]).nan_to_num(nan=0.0, posinf=inf)
    if ratio.numel() <= MAX_SORTED_ROWS:
        return ratio.sort(descending=True, stable=True).indices[:KEPT_ROWS]
    threshold = ratio.topk(KEPT_ROWS).values[-1]
    candidates = (ratio >= threshold).nonzero().view(-1)  # topk does not define the order of ties
    return candidates[ratio[candidates].sort(descending=True, stable=True).indices[:KEPT_ROWS]]


def are_whole(chunks: Sequence[Chunk], cols: int) -> bool:
    """Return whether the chunks span all columns."""
    return chunks[0].stop_col - chunks[0].col == cols


def find_window_maxima(values: Tensor) -> Tensor:
    """Return the largest of the magnitudes, (n, r, c) float32, in each window of columns: (n, r, windows)."""
    n, rows, cols = values.shape
    whole = cols // WINDOW * WINDOW
    bits = view_bits(values)
    maxima = bits[:, :, :whole].reshape(n, rows, -1, WINDOW).amax(3)
    maxima = maxima if whole == cols else torch.cat((maxima, bits[:, :, whole:].amax(2, keepdim=True)), 2)
    return maxima.view(torch.float32)


def view_bits(magnitudes: Tensor) -> Tensor:
    """View float32 magnitudes as int32 bits, which have the same order and are compared twice as fast."""
    return magnitudes.view(torch.int32)
