"""The layers of a report as the page of as_html.py takes them in: columns, rounded to what is shown, packed.

47,000 layers are 110 MB of JSON report and must be less than 2 MB here. So there are few columns with a
number for each layer, and everything about a layer only for those that somebody will look at: the worst.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from quanterr.metrics import METRICS
from quanterr.report.formatting import sentence, sort_layers
from quanterr.report.model import Finding, Report
from quanterr.roles import place_of, role_of
from quanterr.util.text import display

NUMBERS = ("excess_db", "relative_error", "mean_absolute_error", "max_absolute_error", "bits_per_weight")
DIGITS = 4  # of a number in a column
MORE_DIGITS = 5  # of a number in the details
DB_PLACES = 2
DETAILED = 3000  # layers
MAX_FINDINGS = 500

# What happened to a layer, as the page numbers it.
DIFFERS, CHANGED, IDENTICAL, NOT_COMPARED = range(4)

_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)")


class Words:
    """Words that occur often, and the numbers that stand for them."""

    def __init__(self) -> None:
        """Start with none."""
        self.words: dict[str, int] = {}

    def number(self, word: str | None) -> int:
        """The number of a word; -1 of none."""
        return -1 if word is None else self.words.setdefault(word, len(self.words))


def packed(report: Report) -> str:
    """All that the page needs of the layers: JSON, deflated, in base64, as a JSON string."""
    text = json.dumps(page_data(report), allow_nan=False, separators=(",", ":"))
    return json.dumps(base64.b64encode(zlib.compress(text.encode(), 6)).decode())


def page_data(report: Report) -> dict[str, Any]:
    """The same as data."""
    entries = list(_entries(report))
    words = {key: Words() for key in ("role", "format", "shape", "stack", "module", "reason")}
    patterns = Words()
    columns: dict[str, list[Any]] = {"status": [], "pattern": [], "block": [], "snr_db": []}
    columns |= {key: [] for key in (*words, *NUMBERS)}
    numbers: list[int] = []
    for status, entry in entries:
        name = display(entry.layer_name)
        place = place_of(entry.layer_name)
        shape = getattr(entry, "tensor_shape", None)
        description = {
            "role": display(getattr(entry, "role", None) or role_of(entry.layer_name)),
            "format": display(entry.format) if hasattr(entry, "format") else None,
            "shape": None if shape is None else " × ".join(map(str, shape)) or "scalar",
            "stack": place and display(place.stack),
            "module": place and display(place.module),
            "reason": sentence(f"{entry.side}: {entry.reason}") if status == NOT_COMPARED else None,
        }
        columns["status"].append(status)
        columns["pattern"].append(patterns.number(_NUMBER.sub("\0", name)))
        numbers += map(int, _NUMBER.findall(name))
        columns["block"].append(place.block if place else -1)
        for key, word in description.items():
            columns[key].append(words[key].number(word))
        snr = getattr(entry, "snr_db", None)
        columns["snr_db"].append(None if snr is None else round(snr, DB_PLACES))
        for key in NUMBERS:
            columns[key].append(rounded(getattr(entry, key, None), DIGITS))
    rows = {entry.layer_name: row for row, (_, entry) in reversed(list(enumerate(entries)))}
    return {
        "columns": columns,
        "words": {key: list(found.words) for key, found in words.items()},
        "patterns": list(patterns.words),
        "numbers": numbers,
        "metrics": [{"name": m.name, "unit": m.unit, "formula": m.formula, "kind": m.kind} for m in METRICS],
        "usual": {display(name): note.usual_snr_db for name, note in report.formats.items() if note.usual_snr_db},
        "findings": [_finding(found, rows) for found in shown_findings(report)],
        "details": _details(report, rows),
    }


def _entries(report: Report) -> Iterator[tuple[int, Any]]:
    """Every tensor that has a row in the table, with what happened to it."""
    for status, found in (
        (DIFFERS, report.layers),
        (CHANGED, report.other_changes),
        (IDENTICAL, report.lossless),
        (NOT_COMPARED, report.not_compared),
    ):
        for entry in found:
            yield status, entry


def shown_findings(report: Report) -> list[Finding]:
    """The findings that have room in a page, errors first."""
    order = ("error", "warning", "info")
    return sorted(report.findings, key=lambda found: order.index(found.severity))[:MAX_FINDINGS]


def _finding(found: Finding, rows: Mapping[str, int]) -> dict[str, Any]:
    return {
        "severity": found.severity,
        "message": sentence(found.message),
        "remedy": sentence(found.remedy) if found.remedy else None,
        "row": rows.get(found.layer, -1) if found.layer is not None else -1,
    }


def _details(report: Report, rows: Mapping[str, int]) -> dict[str, Any]:
    """Every field of the worst layers and of those with a finding."""
    named = {found.layer for found in shown_findings(report)}
    measured = report.layers + report.other_changes
    worst = sort_layers(report.layers)[:DETAILED] + sort_layers(report.other_changes)[: DETAILED // 10]
    kept = {layer.layer_name: layer for layer in worst}
    kept |= {layer.layer_name: layer for layer in measured if layer.layer_name in named}
    keys = [field.name for field in fields(measured[0])] if measured else []
    told_apart = {"layer_name", "display_name", "role", "block", "format", "tensor_shape"}
    return {
        "rows": [rows[name] for name in kept],
        "columns": {
            key: [_plain(getattr(layer, key)) for layer in kept.values()] for key in keys if key not in told_apart
        },
    }


def _plain(value: Any) -> Any:
    """A value with its numbers rounded and its text harmless."""
    if isinstance(value, float):
        return rounded(value, MORE_DIGITS)
    if isinstance(value, str):
        return sentence(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {display(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value


def rounded(value: float | None, digits: int) -> float | None:
    """To that many significant digits; 0 only for exactly 0."""
    return None if value is None else float(f"{value:.{digits}g}")
