"""What changed as one page: the maps of both reports and of their difference, and a table of all layers."""

from collections.abc import Iterator
from math import inf
from typing import IO, Any

from quanterr.report.diff.model import Both, Diff, Totals
from quanterr.report.formatting import db, number, sentence
from quanterr.report.html_data import DB_PLACES, DIFFERS, IDENTICAL, SAME, Row, columns_of
from quanterr.report.markup import (
    LAYER_SCRIPTS,
    Markup,
    folding,
    headed,
    joined,
    layer_link,
    navigation,
    page,
    part,
    table,
    tag,
)
from quanterr.roles import role_of
from quanterr.util.text import count, display, size

SCRIPTS = (*LAYER_SCRIPTS, "diff")
SECTIONS = (("places-change", "Maps"), ("totals", "Both reports"), ("lists", "What changed"), ("layers", "Layers"))
MAX_LISTED = 50  # layers of a kind
LEVELS = "new_snr_db old_snr_db"  # which share their colours
# Maps: id, metric, title, metrics that share the colours.
MAPS = (
    ("change", "change_db", "Change", "change_db"),
    ("new", "new_snr_db", "New", LEVELS),
    ("old", "old_snr_db", "Old", LEVELS),
)


def write(diff: Diff, file: IO[str]) -> None:
    """Write the page."""
    verdict = "fail" if diff.worse else "pass"
    body = joined(
        headed(verdict, _reasons(diff), Markup(""), f"{count(len(diff.worse), 'layer')} worse"),
        navigation(SECTIONS),
        *(part("one_map", name=name, metric=metric, title=title, scale=scale) for name, metric, title, scale in MAPS),
        folding("totals", "Both reports", _totals(diff)),
        folding("lists", "What changed", *_lists(diff)),
        part("layers"),
    )
    title = f"{len(diff.worse):,} worse, {len(diff.better):,} better"
    file.write(page("diff", title, SCRIPTS, body, columns_of(map(_row, diff.layers))))


def _row(layer: Both) -> Row:
    same = layer.old_snr_db == layer.new_snr_db == inf
    levels = {"old_snr_db": _level(layer.old_snr_db), "new_snr_db": _level(layer.new_snr_db)}
    by = None if layer.change_db is None or abs(layer.change_db) == inf else round(layer.change_db, DB_PLACES)
    words = {"role": role_of(layer.name), "format": layer.format and display(layer.format)}
    return Row(layer.name, IDENTICAL if same else DIFFERS, words, {"change_db": by, **levels})


def _level(value: float | None) -> float | str | None:
    if value is None or value == -inf:
        return None
    return SAME if value == inf else round(value, DB_PLACES)


def _reasons(diff: Diff) -> Iterator[str]:
    if diff.difference:
        yield f"warning: not comparable: {sentence(diff.difference)}"
    yield (
        f"{count(len(diff.worse), 'layer')} worse, {len(diff.better):,} better, {diff.unchanged:,} unchanged, "
        f"{len(diff.undefined):,} undefined in both, {len(diff.added):,} new, {len(diff.gone):,} gone"
    )


def _totals(diff: Diff) -> Markup:
    heads = ["", "verdict", "layers", "SNR dB", "excess dB", "bits/weight", "size"]
    rows = [_cells(word, totals) for word, totals in (("old", diff.old), ("new", diff.new))]
    return table(heads, rows, "rows", len(heads) - 2)


def _cells(word: str, totals: Totals) -> list[str]:
    levels = [db(totals.overall_snr_db), "–" if totals.excess_db is None else db(totals.excess_db)]
    sizes = [number(totals.bits_per_weight), size(totals.quantized_bytes)]
    return [f"{word}: {sentence(totals.path)}", totals.verdict, f"{totals.layers:,}", *levels, *sizes]


def _lists(diff: Diff) -> Iterator[Markup]:
    for word, items in (("worse", diff.worse), ("better", diff.better)):
        if items:
            rows = [
                [
                    layer_link(item.layer),
                    db(item.old_snr_db),
                    db(item.new_snr_db),
                    sentence(item.reason or "") if item.change_db is None else f"{item.change_db:+.2f}",
                ]
                for item in items[:MAX_LISTED]
            ]
            yield from _titled(
                f"{count(len(items), 'layer')} {word}", ["layer", "old dB", "new dB", "change"], rows, items
            )
    formats = [[layer_link(c.layer), display(c.old_format), display(c.new_format)] for c in diff.format_changes]
    if formats:
        title = f"{count(len(formats), 'layer')} in another format"
        yield from _titled(title, ["layer", "old", "new"], formats[:MAX_LISTED], formats)
    for word, names in (("undefined in both", diff.undefined), ("new", diff.added), ("gone", diff.gone)):
        if names:
            rows = [[display(name)] for name in names[:MAX_LISTED]]
            yield from _titled(f"{count(len(names), 'layer')} {word}", ["layer"], rows, names)
    if not any((diff.worse, diff.better, formats, diff.undefined, diff.added, diff.gone)):
        yield tag("p", "Nothing changed.", class_="none")


def _titled(title: str, heads: list[str], rows: list[list[str]], whole: list[Any]) -> Iterator[Markup]:
    yield tag("h3", title)
    yield table(heads, rows, "rows", len(heads) - 1)
    if len(whole) > len(rows):
        yield tag("p", f"and {len(whole) - len(rows):,} more, in the table below", class_="about")
