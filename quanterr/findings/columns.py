"""Columns that hold the values of other columns of the original.

GPTQ may leave any error in a column, and a search by importance may give a column up, so that the size of an error
shows nothing. But what they leave there is error of rounding, which no other column of the original resembles. A few
runs of rows are compared with all columns.
"""

from collections.abc import Iterator, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.code_samples import CodeSample, read_code_sample
from quanterr.findings.codes import make_finding
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import BIT_DB, DOUBLE_DB, ENOUGH
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import torch
from quanterr.metrics.attainable import level
from quanterr.util.text import display, listed

MOST_COLUMNS = 64  # columns of a weight that are compared with all others, at most
MOST_NAMED = 3


def name_moved_columns(found: Sequence[Finding], seen: Sequence[WeightSummary], reader: Reader) -> list[Finding]:
    """Return the findings, with a finding for each weight whose columns hold the values of others.

    It replaces those that only say that these columns lost much. Weights are read again only if they have columns that
    are unlike their own.
    """
    moved = [one for weight in seen if weight.unlike_columns for one in _check_weight(weight, reader)]
    places = {one.layer: one.evidence["places"] for one in moved}

    def is_named(one: Finding) -> bool:
        known = places.get(one.layer, [])
        return one.code == "excess_columns" and bool(known) and all(list(at) in known for at in one.evidence["places"])

    return [*(one for one in found if not is_named(one)), *moved]


def _check_weight(one: WeightSummary, reader: Reader) -> Iterator[Finding]:
    sample = None if one.pair.quantized.rotated else read_code_sample(one.pair, reader)
    if sample is None or len(sample.x) < 2 * ENOUGH:  # of fewer rows, two columns may look alike by chance
        return
    alike = _equalize_rows(sample)
    found = [_find_moved(alike, column) for column in one.unlike_columns[:MOST_COLUMNS]]
    moved = sorted(set[tuple[int, int]]().union(*found))
    if not moved:
        return
    what = [f"column {place} holds the values of column {source} of the original" for place, source in moved]
    places = sorted({place for place, _ in moved})
    x, error = (side[:, places].double() for side in (sample.x, sample.y - sample.x))
    yield make_finding(
        "excess_columns",
        "warning",
        one.pair.name,
        f"{display(one.pair.name)}: columns were exchanged or copied: {listed(what, MOST_NAMED)}",
        "quantize this layer again; if columns are still exchanged, look at how the quantizer orders them (g_idx)",
        places=[[-1, place] for place in places[:MOST_COLUMNS]],
        number=len(places),
        worst_snr_db=level(1.0, float((error.square().sum(0) / x.square().sum(0)).max())),
    )


def _equalize_rows(sample: CodeSample) -> CodeSample:
    """Return the sample with rows of the same energy: a few heavy rows would make any two columns alike."""
    size = sample.x.square().mean(1, keepdim=True).sqrt()
    size = torch.where(size > 0, size, 1.0)
    shift = None if sample.shift is None else sample.shift / size
    return sample._replace(x=sample.x / size, y=sample.y / size, unit=sample.unit / size, shift=shift)


def _find_moved(sample: CodeSample, column: int) -> set[tuple[int, int]]:
    """Return (place, source) of each column that holds another one of the original, if either is ``column``.

    It holds the values of the other one, or its codes.
    """
    x, y, unit, _, _ = sample
    shift = torch.zeros(()).expand_as(x) if sample.shift is None else sample.shift
    codes = ((y - shift) / unit).nan_to_num(0.0, 0.0, 0.0)
    every, only = slice(None), slice(column, column + 1)
    moved = set[tuple[int, int]]()
    for place, source in ((only, every), (every, only)):
        own = (y[:, place] - x[:, place]).double().square().sum(0)
        for held in (y[:, place], codes[:, place] * unit[:, source] + shift[:, source]):
            errors, energies = ((held - x[:, source] * times).double().square().sum(0) for times in (1, 0))
            # Values that have nothing in common differ by more than the energy of either.
            fits = (errors * 10 ** (BIT_DB / 10) < own) & (errors * 10 ** (DOUBLE_DB / 10) < energies)
            others = fits.nonzero().flatten().tolist()
            moved |= {(column, other) if place == only else (other, column) for other in others if other != column}
    return moved
