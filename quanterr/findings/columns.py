"""Columns that hold the values of other columns of the original.

The size of a column's error proves nothing: GPTQ may leave any error in a column, and a search by importance may give a
column up. But errors of rounding do not make a column resemble another column of the original. So a sample of rows of
suspicious columns is compared with all columns.
"""

from collections.abc import Iterator, Sequence

from quanterr.documents.base import Finding
from quanterr.findings.code_samples import CodeSample, read_code_sample
from quanterr.findings.codes import make_finding
from quanterr.findings.layers import WeightSummary
from quanterr.findings.limits import BIT_DB, DOUBLE_DB, MIN_VALUES
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import torch
from quanterr.metrics.attainable import level
from quanterr.util.text import display, itemize

MAX_COLUMNS = 64  # maximum number of columns of a weight that are compared with all others
MAX_LISTED_COLUMNS = 3


def name_moved_columns(findings: Sequence[Finding], seen: Sequence[WeightSummary], reader: Reader) -> list[Finding]:
    """Return the findings, with a finding for each weight whose columns hold the values of other columns.

    It replaces findings that only state the large error of these columns. Weights are read again only if they have
    columns that do not resemble the original's column at the same place.
    """
    moved = [finding for weight in seen if weight.unlike_columns for finding in _check_weight(weight, reader)]
    places = {finding.layer: finding.evidence["places"] for finding in moved}

    def is_named(finding: Finding) -> bool:
        known = places.get(finding.layer, [])
        return (
            finding.code == "excess_columns"
            and bool(known)
            and all(list(at) in known for at in finding.evidence["places"])
        )

    return [*(finding for finding in findings if not is_named(finding)), *moved]


def _check_weight(weight: WeightSummary, reader: Reader) -> Iterator[Finding]:
    sample = None if weight.pair.quantized.rotated else read_code_sample(weight.pair, reader)
    if sample is None or len(sample.x) < 2 * MIN_VALUES:  # in fewer rows, two columns may look alike by chance
        return
    equalized = _equalize_rows(sample)
    moves_by_column = [_find_moved(equalized, column) for column in weight.unlike_columns[:MAX_COLUMNS]]
    moved = sorted(set[tuple[int, int]]().union(*moves_by_column))
    if not moved:
        return
    what = [f"column {place} holds the values of column {source} of the original" for place, source in moved]
    places = sorted({place for place, _ in moved})
    x, error = (side[:, places].double() for side in (sample.x, sample.y - sample.x))
    yield make_finding(
        "excess_columns",
        "warning",
        weight.pair.name,
        f"{display(weight.pair.name)}: columns were exchanged or copied: {itemize(what, MAX_LISTED_COLUMNS)}",
        "quantize this layer again; if columns are still exchanged, look at how the quantizer orders them (g_idx)",
        places=[[-1, place] for place in places[:MAX_COLUMNS]],
        number=len(places),
        worst_snr_db=level(1.0, float((error.square().sum(0) / x.square().sum(0)).max())),
    )


def _equalize_rows(sample: CodeSample) -> CodeSample:
    """Return the sample with rows of the same energy; otherwise a few large rows make any two columns look alike."""
    size = sample.x.square().mean(1, keepdim=True).sqrt()
    size = torch.where(size > 0, size, 1.0)
    shift = None if sample.shift is None else sample.shift / size
    return sample._replace(x=sample.x / size, y=sample.y / size, unit=sample.unit / size, shift=shift)


def _find_moved(sample: CodeSample, column: int) -> set[tuple[int, int]]:
    """Return (place, source) of each column that holds another column of the original, if either is ``column``.

    It holds the values of the other column, or its codes.
    """
    x, y, unit, _, _ = sample
    shift = torch.zeros(()).expand_as(x) if sample.shift is None else sample.shift
    codes = ((y - shift) / unit).nan_to_num(0.0, 0.0, 0.0)
    every, only = slice(None), slice(column, column + 1)
    moved = set[tuple[int, int]]()
    for place, source in ((only, every), (every, only)):
        errors_in_place = (y[:, place] - x[:, place]).double().square().sum(0)
        for held in (y[:, place], codes[:, place] * unit[:, source] + shift[:, source]):
            errors, energies = ((held - x[:, source] * times).double().square().sum(0) for times in (1, 0))
            # Values that have nothing in common differ by more than the energy of either.
            fits = (errors * 10 ** (BIT_DB / 10) < errors_in_place) & (errors * 10 ** (DOUBLE_DB / 10) < energies)
            others = fits.nonzero().flatten().tolist()
            moved |= {(column, other) if place == only else (other, column) for other in others if other != column}
    return moved
