"""Outlier columns that set the scales of whole rows and thereby limit a weight's SNR."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log10
from statistics import median
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.checks import RESULT, WEIGHTS, check
from quanterr.findings.codes import make_finding
from quanterr.findings.layers import AllWeights, WeightSummary
from quanterr.findings.limits import BIT_DB, MAX_METHOD_LOSS_DB, MIN_PEERS, SMALL_DB
from quanterr.formats import Weight
from quanterr.formats.reading import FIRST_ROWS, Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.selection.roles import role_of
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import count, display, itemize

SAMPLED_PLACES = 32  # places of a weight to read rows from, as outliers may be in one part of a fused weight
CONTIGUOUS_SHARE = 0.9  # affected rows are one part of a weight if they are this share of the rows from first to last
MAX_WEIGHTS = 8  # maximum number of weights to read again
MAX_OUTLIER_COLUMNS = 16  # per weight; also, at most one of 16 columns is an outlier

Group = tuple[str, str]  # format and role


class _Ruling(NamedTuple):
    """Columns that set the scales of rows, or the scale of the whole weight."""

    columns: list[int]
    ruled: Tensor  # (r,) or (1,) bool: whether the columns set the scale of a sampled row, or of the weight
    snr_db: float  # SNR without the columns


@check("outlier_column", needs=RESULT, of=WEIGHTS)
def check_outlier_columns(weights: AllWeights) -> Iterator[Finding]:
    """Report outlier columns of the worst weights that are as good as their scales allow."""
    seen = weights.seen
    low = [weight for weight in seen if weight.near and weight.figures and _is_low(weight, weight.figures.snr_db)]
    low.sort(key=lambda weight: weight.figures.snr_db if weight.figures else 0.0)
    usual = _find_usual_levels(seen) if low else {}
    for weight in low[:MAX_WEIGHTS]:
        assert weight.figures is not None  # noqa: S101 - others are not low
        by_row = weight.pair.quantized.scale is not None and weight.pair.quantized.scale.n > 1
        rows, x = _read_spread_rows(weight.pair.original, weights.reader)
        ruling = _find_ruling_columns(x, by_row, weight.figures.snr_db)
        if ruling:
            whose = _describe_rows(rows, ruling.ruled) if by_row else "the whole weight"
            yield _describe(weight.pair.name, weight.figures.snr_db, ruling, whose, usual.get(_find_group(weight)))


def _read_spread_rows(weight: Weight, reader: Reader) -> tuple[list[int], Tensor]:
    """Return the indices of rows from SAMPLED_PLACES places, and these rows, (r, c) float64."""
    rows, cols = weight.matrix
    if rows * cols <= FIRST_ROWS or cols >= FIRST_ROWS:
        x = reader.read_first_rows(weight)
        return list(range(len(x))), x
    n = max(FIRST_ROWS // cols, 1)
    places = min(SAMPLED_PLACES, n)
    starts = [place * rows // places for place in range(places)]
    chunks = [Chunk(start, start + n // places, 0, cols) for start in starts]
    x = torch.cat([reader.read(weight, chunk).double() for chunk in chunks])
    return [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)], x


def _describe_rows(rows: Sequence[int], ruled: Tensor) -> str:
    """Return the share of sampled rows whose scale an outlier sets, and where they are if they are contiguous."""
    places = ruled.nonzero().flatten().tolist()
    share = f"{100 * len(places) / len(rows):.3g} % of the sampled rows"
    first, last = places[0], places[-1]
    is_part = last - first + 1 < CONTIGUOUS_SHARE * len(rows) and len(places) >= CONTIGUOUS_SHARE * (last - first + 1)
    return f"{share}, between rows {rows[first]:,} and {rows[last]:,}" if is_part else share


def _find_group(weight: WeightSummary) -> Group:
    return weight.pair.quantized.format, role_of(weight.pair.name)


def _find_usual_levels(seen: Sequence[WeightSummary]) -> Mapping[Group, float]:
    """Return the median SNR in dB of the weights of each format and role, for groups of more than MIN_PEERS."""
    levels: dict[Group, list[float]] = defaultdict(list)
    for weight in seen:
        if weight.figures and len(weight.pair.original.shape) > 1:
            levels[_find_group(weight)].append(weight.figures.snr_db)
    return {group: median(group_levels) for group, group_levels in levels.items() if len(group_levels) > MIN_PEERS}


def _is_low(summary: WeightSummary, snr_db: float) -> bool:
    """Return True for a weight with a scale per row, or one scale, and an SNR far below what its bits allow."""
    weight = summary.pair.quantized
    whole_rows = weight.block_size is None and weight.uniform_bits is not None and len(weight.shape) == 2
    return (
        whole_rows
        and weight.shape[1] >= MAX_OUTLIER_COLUMNS
        and snr_db < BIT_DB * ((weight.uniform_bits or 0) - 1) - MAX_METHOD_LOSS_DB
    )


def _find_ruling_columns(x: Tensor, by_row: bool, snr_db: float) -> _Ruling | None:
    """Return the smallest set of columns that sets the scales behind most of the error, and costs a bit or more.

    Args:
        x: rows of the original, (r, c).
        by_row: whether each row has its own scale; otherwise all rows share one.
        snr_db: SNR of the weight [dB].
    """
    size = x.abs()
    max_columns = min(MAX_OUTLIER_COLUMNS, x.shape[1] // MAX_OUTLIER_COLUMNS)
    columns = size.square().sum(0).topk(max_columns).indices.tolist()
    tried = [ruling for n in range(1, max_columns + 1) if (ruling := _leave_out(size, columns[:n], by_row, snr_db))]
    best = max((ruling.snr_db for ruling in tried), default=snr_db)
    sufficient = (ruling for ruling in tried if ruling.snr_db >= best - SMALL_DB)
    return next(sufficient, None) if best >= snr_db + BIT_DB else None


def _leave_out(size: Tensor, columns: Sequence[int], by_row: bool, snr_db: float) -> _Ruling | None:
    """Return the SNR without some columns; None if they do not set the scales behind most of the error.

    The energy of rounding errors is proportional to the squares of scales, and scales to the largest values.
    """
    rest = size.index_fill(1, torch.tensor(columns), 0.0)
    largest, without = (part.amax(1) if by_row else part.amax().view(1) for part in (size, rest))
    energy, kept = float(largest.square().sum()), float(without.square().sum())
    signal = float(rest.square().sum() / size.square().sum().clamp(min=1e-30))
    ruled = largest > without
    if not kept or not signal or 2 * float(largest[ruled].square().sum()) < energy:
        return None
    return _Ruling(sorted(columns), ruled, snr_db + 10 * log10(energy / kept * signal))


def _describe(name: str, snr_db: float, ruling: _Ruling, whose: str, usual_db: float | None) -> Finding:
    """Return the finding; ``usual_db`` is the median SNR of weights of the same format and role, if known."""
    several = len(ruling.columns) > 1
    numbers = itemize(list(map(str, ruling.columns)), MAX_OUTLIER_COLUMNS)
    what = (
        f"{count(len(ruling.columns), 'outlier column')}, {numbers}, set"
        if several
        else f"an outlier in column {ruling.columns[0]} sets"
    )
    usual = "" if usual_db is None else f" where its peers reach {usual_db:.1f}"
    message = (
        f"{display(name)}: its scales allow no more than {snr_db:.1f} dB{usual}: {what} the scale of {whose}; without "
        f"{'them' if several else 'it'} the SNR would be about {ruling.snr_db:.0f} dB"
    )
    remedy = "use a scale per block of columns, smooth or rotate the layer's inputs, or leave the weight unquantized"
    return make_finding(
        "outlier_column",
        "info",
        name,
        message,
        remedy,
        column=ruling.columns[0],
        columns=ruling.columns,
        snr_db_without=ruling.snr_db,
        median_snr_db=usual_db,
    )
