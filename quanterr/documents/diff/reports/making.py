"""The diff of two reports of one original: layers that are better, worse, new or gone."""

from math import inf, isfinite

from quanterr.documents.comparison import NORM
from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.same_original import find_difference
from quanterr.documents.comparison.values import ReportValues
from quanterr.documents.diff.base import SAME_DB, check_comparable, pair_up
from quanterr.documents.diff.reports.model import SCHEMA, SCHEMA_VERSION, Both, Change, Diff, FormatChange, Totals
from quanterr.documents.subjects import Item, compute_change

METRICS = ("format", "snr_db", "excess_db", NORM)
AGGREGATES = ("overall_snr_db", "excess_db", "bits_per_weight")


def diff_reports(old: Report, new: Report, paths: tuple[str, str], force: bool = False) -> Diff:
    """Compare two reports, whose layers have at least :data:`METRICS`.

    Raises:
        UsageError: their originals, selections or settings differ, and ``force`` is False.
    """
    why = find_difference(old, new)
    check_comparable(paths, why, force)
    both, added, gone = pair_up(*({item.name: item for item in ReportValues(one).items} for one in (old, new)))
    found = Diff(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        difference=why,
        old=_totals(paths[0], old),
        new=_totals(paths[1], new),
        added=added,
        gone=gone,
        format_changes=[],
    )
    for was, now in both:
        _sort_layer(found, was, now)
    found.worse.sort(key=lambda item: (item.change_db is not None, item.change_db))
    found.better.sort(key=lambda item: (item.new_snr_db is None, item.change_db is not None, -(item.change_db or 0)))
    return found


def _totals(path: str, report: Report) -> Totals:
    aggregate = {name: getattr(report.aggregate, name) for name in AGGREGATES}
    return Totals(path, report.verdict, len(report.layers), **aggregate, quantized_bytes=report.quantized.bytes)


def _sort_layer(found: Diff, was: Item, now: Item) -> None:
    """Sort a layer into the diff's lists. A layer whose SNR became undefined is worse, whatever the SNR was."""
    old_format, new_format = getattr(was.values, "format", None), getattr(now.values, "format", None)
    if old_format != new_format and old_format and new_format:
        found.format_changes.append(FormatChange(now.name, old_format, new_format))
    before = None if was.trouble else was.get_number("snr_db")
    after = None if now.trouble else now.get_number("snr_db")
    by = compute_change(before, after)
    found.layers.append(Both(now.name, before, after, by, new_format))
    if before is None and after is None:
        found.undefined.append(now.name)
        return
    if by is not None and abs(by) <= SAME_DB:
        found.unchanged += 1
        return
    before_db, after_db, by_db = (v if v is not None and isfinite(v) else None for v in (before, after, by))
    reason = _find_reason(was, now, before, after) if by_db is None else None
    excess = (getattr(weight.values, "excess_db", None) for weight in (was, now))
    item = Change(now.name, before_db, after_db, by_db, reason, *excess)
    (found.worse if after is None or (by is not None and by < 0) else found.better).append(item)


def _find_reason(was: Item, now: Item, before: float | None, after: float | None) -> str:
    if after is None:
        return now.trouble or "its SNR is undefined"
    if before is None:
        return f"before: {was.trouble or 'its SNR was undefined'}"
    if inf in (before, after):
        return f"{'was' if before == inf else 'is'} identical to the original"
    return f"its SNR {'was' if before == -inf else 'is'} minus infinity: the original is all zeros"
