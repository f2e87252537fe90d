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
from quanterr.util.text import count, display, listed

PLACES = 32  # places of a weight to read rows from: outliers may be in one part of a fused weight
ONE_PLACE = 0.9  # ruled rows are one part of a weight if they are this share of the rows from first to last
MOST = 8  # most weights to read again
MOST_COLUMNS = 16  # most outlier columns; also, at most one of so many columns is an outlier

Group = tuple[str, str]  # format and role


class _Ruling(NamedTuple):
    """Columns that set the scales of rows, or the scale of the whole weight."""

    columns: list[int]
    ruled: Tensor  # (r,) or (1,) bool: whether they set the scale of a sampled row
    snr_db: float  # SNR without them


@check("outlier_column", needs=RESULT, of=WEIGHTS)
def check_outlier_columns(weights: AllWeights) -> Iterator[Finding]:
    """Report the columns that limit the scales, for the worst weights that are as good as their scales allow."""
    seen = weights.seen
    low = [weight for weight in seen if weight.near and weight.figures and _is_low(weight, weight.figures.snr_db)]
    low.sort(key=lambda one: one.figures.snr_db if one.figures else 0.0)
    usual = _find_usual_levels(seen) if low else {}
    for one in low[:MOST]:
        assert one.figures is not None  # noqa: S101 - others are not low
        by_row = one.pair.quantized.scale is not None and one.pair.quantized.scale.n > 1
        rows, x = _read_spread_rows(one.pair.original, weights.reader)
        found = _find_ruling_columns(x, by_row, one.figures.snr_db)
        if found:
            whose = _describe_rows(rows, found.ruled) if by_row else "the whole weight"
            yield _describe(one.pair.name, one.figures.snr_db, found, whose, usual.get(_find_group(one)))


def _read_spread_rows(weight: Weight, reader: Reader) -> tuple[list[int], Tensor]:
    """Return the indices of rows from PLACES places, and these rows, (r, c) float64 of about FIRST_ROWS elements."""
    rows, cols = weight.matrix
    if rows * cols <= FIRST_ROWS or cols >= FIRST_ROWS:
        x = reader.read_first_rows(weight)
        return list(range(len(x))), x
    n = max(FIRST_ROWS // cols, 1)
    places = min(PLACES, n)
    starts = [place * rows // places for place in range(places)]
    chunks = [Chunk(start, start + n // places, 0, cols) for start in starts]
    x = torch.cat([reader.read(weight, chunk).double() for chunk in chunks])
    return [row for chunk in chunks for row in range(chunk.row, chunk.stop_row)], x


def _describe_rows(rows: Sequence[int], ruled: Tensor) -> str:
    """Return the share of the sampled rows that are ruled, and where they are if that is one part of the weight."""
    found = ruled.nonzero().flatten().tolist()
    share = f"{100 * len(found) / len(rows):.3g} % of the sampled rows"
    first, last = found[0], found[-1]
    is_part = last - first + 1 < ONE_PLACE * len(rows) and len(found) >= ONE_PLACE * (last - first + 1)
    return f"{share}, between rows {rows[first]:,} and {rows[last]:,}" if is_part else share


def _find_group(one: WeightSummary) -> Group:
    return one.pair.quantized.format, role_of(one.pair.name)


def _find_usual_levels(seen: Sequence[WeightSummary]) -> Mapping[Group, float]:
    """Return the median SNR in dB of the weights of each format and role, for groups of more than PEERS."""
    levels: dict[Group, list[float]] = defaultdict(list)
    for weight in seen:
        if weight.figures and len(weight.pair.original.shape) > 1:
            levels[_find_group(weight)].append(weight.figures.snr_db)
    return {group: median(found) for group, found in levels.items() if len(found) > MIN_PEERS}


def _is_low(one: WeightSummary, snr_db: float) -> bool:
    """Return True for a weight with a scale per row (or one scale) and an SNR far below its bits."""
    weight = one.pair.quantized
    whole_rows = weight.block_size is None and weight.uniform_bits is not None and len(weight.shape) == 2
    return (
        whole_rows
        and weight.shape[1] >= MOST_COLUMNS
        and snr_db < BIT_DB * ((weight.uniform_bits or 0) - 1) - MAX_METHOD_LOSS_DB
    )


def _find_ruling_columns(x: Tensor, by_row: bool, snr_db: float) -> _Ruling | None:
    """Return the fewest columns that set the scales of most of the error and together cost a bit or more.

    Args:
        x: rows of the original, (r, c).
        by_row: whether each row has its own scale; otherwise all rows share one.
        snr_db: SNR of the weight [dB].
    """
    size = x.abs()
    most = min(MOST_COLUMNS, x.shape[1] // MOST_COLUMNS)
    columns = size.square().sum(0).topk(most).indices.tolist()
    tried = [found for n in range(1, most + 1) if (found := _leave_out(size, columns[:n], by_row, snr_db))]
    best = max((found.snr_db for found in tried), default=snr_db)
    enough = (found for found in tried if found.snr_db >= best - SMALL_DB)
    return next(enough, None) if best >= snr_db + BIT_DB else None


def _leave_out(size: Tensor, columns: Sequence[int], by_row: bool, snr_db: float) -> _Ruling | None:
    """Return the SNR without some columns; None if they do not set the scales.

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


def _describe(name: str, snr_db: float, found: _Ruling, whose: str, usual_db: float | None) -> Finding:
    """Return the finding; ``usual_db`` is the median SNR of weights of the same format and role, if known."""
    several = len(found.columns) > 1
    which = f"{count(len(found.columns), 'outlier column')}, {listed(list(map(str, found.columns)), MOST_COLUMNS)},"
    what = f"{which} set" if several else f"an outlier in column {found.columns[0]} sets"
    usual = "" if usual_db is None else f" where its peers reach {usual_db:.1f}"
    message = (
        f"{display(name)}: its scales allow no more than {snr_db:.1f} dB{usual}: {what} the scale of {whose}; without "
        f"{'them' if several else 'it'} the SNR would be about {found.snr_db:.0f} dB"
    )
    remedy = "use a scale per block of columns, smooth or rotate the layer's inputs, or leave the weight unquantized"
    return make_finding(
        "outlier_column",
        "info",
        name,
        message,
        remedy,
        column=found.columns[0],
        columns=found.columns,
        snr_db_without=found.snr_db,
        median_snr_db=usual_db,
    )
