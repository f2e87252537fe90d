"""The view of a diff of two reports: totals, layers that are worse or better, maps; and its CSV rows."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import inf, log10

from quanterr.documents.diff.reports.model import Both, Change, Diff, Totals
from quanterr.outputs.formatting import format_if_known
from quanterr.outputs.page.columns import DB_PLACES, DIFFERS, IDENTICAL, SAME
from quanterr.outputs.sections import (
    LAYERS,
    MAP,
    CellColumn,
    Column,
    LayerName,
    MapMetric,
    Maps,
    Row,
    Section,
    Table,
    View,
    fill,
)
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display, itemize, size
from quanterr.views.diff.parts import format_answer, format_sizes, join_counts, list_names, make_view

MINOR_DB = 10 * log10(1.01)  # a change of the squared error by 1 %
MAX_SUMMARIZED = 3  # maximum number of layers in each part of the summary
MIN_SHOWN_DB = 0.5  # minimum change of the avoidable loss that is shown; rounding may cause smaller ones
TOTALS: Sequence[CellColumn[Totals]] = (
    (Column("verdict", 1, right=False), lambda totals: totals.verdict),
    (Column("layers", 4), lambda totals: f"{totals.layers:,}"),
    (Column("SNR dB", 0), lambda totals: format_if_known(totals.overall_snr_db)),
    (Column("excess dB", 5), lambda totals: format_if_known(totals.excess_db)),
    (Column("bits/w", 3), lambda totals: format_if_known(totals.bits_per_weight, ".4g")),
    (Column("size", 2), lambda totals: size(totals.quantized_bytes)),
)
CHANGES: Sequence[CellColumn[Change]] = (
    (Column("old dB", 1), lambda item: format_if_known(item.old_snr_db)),
    (Column("new dB", 2), lambda item: format_if_known(item.new_snr_db)),
    (Column("change dB", 0), lambda item: format_if_known(item.change_db, "+.4g", display(item.reason or "", 2000))),
)
EXCESS: CellColumn[Change] = (
    Column("excess dB", 3),
    lambda item: f"{format_if_known(item.old_excess_db)} -> {format_if_known(item.new_excess_db)}",
)
FORMATS = (Column("old", 0, right=False), Column("new", 1, right=False))
CSV_COLUMNS = (
    *("list", "layer_name", "old_snr_db", "new_snr_db", "change_db", "old_excess_db", "new_excess_db"),
    *("old_format", "new_format", "reason"),
)
METRICS = {
    "change_db": MapMetric("Change", "higher", "dB", column="Change dB", is_signed=True),
    "old_snr_db": MapMetric("Old SNR", "higher", "dB", column="Old dB", is_wide=True),
    "new_snr_db": MapMetric("New SNR", "higher", "dB", column="New dB"),
}
WORDS = {"role": "Role", "format": "Format"}
ABOUT = (
    "From two stored reports. SNR is the energy of the original over the energy of the error, in dB; a positive change "
    "is better. Weight error is not task accuracy."
)


def view(diff: Diff, top: int) -> View:
    """Return the view of a diff, with ``top`` layers in each table."""
    maps = Maps(METRICS, WORDS, lambda: map(_make_row, diff.layers), "change_db", "change_db")
    paths = diff.old.path, diff.new.path
    answer, sections, summary = conclusion(diff), _sections(diff, top), list(_summarize(diff))
    return make_view(paths, answer, sections, ABOUT, maps if diff.layers else None, summary)


def _summarize(diff: Diff) -> Iterator[str]:
    """Yield the layers that lost and gained most, and those in only one report."""
    for word, items in (("worse", diff.worse), ("better", diff.better)):
        for item in items[:MAX_SUMMARIZED]:
            change = display(item.reason or "", 2000) if item.change_db is None else f"{item.change_db:+.4g} dB"
            levels = f"{format_if_known(item.old_snr_db)} -> {format_if_known(item.new_snr_db)} dB"
            yield f"  {word}: {change}  {display(item.layer)}: {levels}"
    for word, names in (("new", diff.added), ("gone", diff.gone), ("undefined in both", diff.undefined)):
        if names:
            yield f"  {word}: {itemize(names, MAX_SUMMARIZED)}"
    for other in diff.format_changes[:MAX_SUMMARIZED]:
        yield f"  in another format: {display(other.layer)}: {other.old_format} -> {other.new_format}"


def conclusion(diff: Diff) -> str:
    """Return the changes in a sentence, such as "4 layers worse, 2 better; 32.13 -> 30.77 dB over all; 2.50 MiB"."""
    layers = "layer" if len(diff.worse) == 1 else "layers"
    numbers = join_counts(
        [
            (len(diff.worse), f"{layers} worse"),
            (len(diff.better), "better"),
            (diff.unchanged, "unchanged"),
            (len(diff.undefined), "undefined in both"),
            (len(diff.added), "new"),
            (len(diff.gone), "gone"),
            (len(diff.format_changes), "in another format"),
        ]
    )
    levels = f"{format_if_known(diff.old.overall_snr_db)} -> {format_if_known(diff.new.overall_snr_db)} dB over all"
    verdicts = "" if diff.old.verdict == diff.new.verdict else f"; {diff.old.verdict} -> {diff.new.verdict}"
    stored = format_sizes(diff.old.quantized_bytes, diff.new.quantized_bytes)
    return format_answer(diff.difference, f"{numbers}; {levels}; {stored}{verdicts}")


def _sections(diff: Diff, top: int) -> Iterator[Section]:
    rows = (("old", diff.old), ("new", diff.new))
    yield Section("totals", "Both reports", [Table("Both reports", "report", *fill(TOTALS, rows))])
    for word, items in (("worse", diff.worse), ("better", diff.better)):
        if items:
            title = f"{count(len(items), 'layer')} {word}"
            yield Section(word, title, [_make_changes_table(title, items, top)])
        if word == "worse" and diff.layers:
            yield MAP
    lists = (
        ("undefined", "undefined in both", diff.undefined),
        ("new", "new", diff.added),
        ("gone", "gone", diff.gone),
    )
    yield from list_names("layer", lists, top, LayerName)
    if diff.format_changes:
        title = f"{count(len(diff.format_changes), 'layer')} in another format"
        formats = [[LayerName(c.layer), c.old_format, c.new_format] for c in diff.format_changes[:top]]
        more = len(diff.format_changes) - len(formats)
        yield Section("formats", title, [Table(title, "layer", FORMATS, formats, more)])
    yield from [LAYERS] if diff.layers else []


def _make_changes_table(title: str, items: Sequence[Change], top: int) -> Table:
    """Return a table of changed layers, with a column for the avoidable loss if that changed."""
    shown = items[:top]
    changed = any(abs((item.old_excess_db or 0.0) - (item.new_excess_db or 0.0)) > MIN_SHOWN_DB for item in shown)
    filled = fill([*CHANGES, *([EXCESS] if changed else [])], ((LayerName(item.layer), item) for item in shown))
    by = (item.change_db for item in reversed(shown))
    minor = len(list(takewhile(lambda change: change is not None and abs(change) < MINOR_DB, by)))
    return Table(title, "layer", *filled, len(items) - len(shown), minor, "that change by less than 1 %")


def _make_row(layer: Both) -> Row:
    """Return a layer of the map; if it has become identical to the original, its change is a word, not a number."""
    same = layer.old_snr_db == layer.new_snr_db == inf
    change = layer.change_db
    by = SAME if change == inf else None if change is None or change == -inf else round(change, DB_PLACES)
    levels = {"old_snr_db": _format_level(layer.old_snr_db), "new_snr_db": _format_level(layer.new_snr_db)}
    words = {"role": role_of(layer.name), "format": layer.format and display(layer.format)}
    return Row(layer.name, IDENTICAL if same else DIFFERS, words, {"change_db": by, **levels})


def _format_level(value: float | None) -> float | str | None:
    if value is None or value == -inf:
        return None
    return SAME if value == inf else round(value, DB_PLACES)


def rows(diff: Diff) -> Iterator[JsonObject]:
    """Yield CSV rows: both reports, then each changed, new or gone layer, by ``list``."""
    numbers = CSV_COLUMNS[2:7]
    for word, totals in (("old", diff.old), ("new", diff.new)):
        yield {"list": word, "reason": totals.verdict, f"{word}_snr_db": totals.overall_snr_db}
    for word, items in (("worse", diff.worse), ("better", diff.better)):
        for item in items:
            values = {name: getattr(item, name) for name in numbers}
            yield {"list": word, "layer_name": item.layer, "reason": item.reason, **values}
    for word, names in (("undefined", diff.undefined), ("new", diff.added), ("gone", diff.gone)):
        yield from ({"list": word, "layer_name": name} for name in names)
    for change in diff.format_changes:
        formats = {"old_format": change.old_format, "new_format": change.new_format}
        yield {"list": "formats", "layer_name": change.layer, **formats}
