"""The layers of a report as data for the scripts of its page.

A JSON report of 47,000 layers is 110 MB; here it must stay below 2 MB. So only a few metrics are stored for each layer,
and all details only for the worst ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quanterr.advice.kept_commands import list_words
from quanterr.advice.kept_layers import (
    KeptLayer,
    find_common_dtype,
    list_keepable,
    order_by_worth,
    propose_kept,
)
from quanterr.documents.base import Finding
from quanterr.documents.comparison.layer import Layer, find_sizes
from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.values import LAYER_METRICS
from quanterr.metrics import PREDICTED
from quanterr.metrics.scores import Score, list_columns
from quanterr.outputs.formatting import sentence
from quanterr.outputs.page.columns import (
    CHANGED,
    DB_PLACES,
    DIFFERS,
    DIGITS,
    IDENTICAL,
    MAX_DETAILED,
    MORE_DIGITS,
    NOT_COMPARED,
    SHARE_DIGITS,
    pack_columns,
    round_digits,
)
from quanterr.outputs.sections import MapMetric
from quanterr.selection.roles import role_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display
from quanterr.views.comparison.layers import sort_layers

if TYPE_CHECKING:
    from quanterr.documents.evaluation.model import Evaluated

# From an evaluation; predictions also from a sensitivity file.
EVALUATED = {
    "output_error": MapMetric("Output error", "lower", "%", log=True, column="Output error %", is_wide=True)
} | {name: MapMetric.of(LAYER_METRICS[name]) for name in PREDICTED}
SHARE, SIZE = (
    MapMetric("Share of the error", "lower", "%", log=True, column="Share %", is_wide=True),
    MapMetric("Size", "lower", "B", log=True, column="Size", is_wide=True),
)
WORDS = {"role": "Role", "format": "Format", "shape": "Shape"}
MAX_FINDINGS = 500
MAX_KEPT = 1000  # proposed layers; whoever keeps more needs another format


def page_data(report: Report, evaluated: "Evaluated | None" = None) -> JsonObject:
    """Return the data of a report's page; ``evaluated`` adds the measured error of each weight."""
    tensors = list(_iterate_tensors(report))
    names = [tensor.layer_name for _, tensor in tensors]
    weights = {weight.layer_name: weight for weight in evaluated.weights} if evaluated else {}
    every = (*weights.values(), *report.layers)
    shown = [key for key in EVALUATED if any(getattr(entry, key, None) is not None for entry in every)]
    proposed, total = propose_kept(report)
    rows = {name: row for row, name in reversed(list(enumerate(names)))}
    columns = {declared.name: MapMetric.of(declared) for declared in list_columns(Layer)}
    metrics = columns | {"error_share": SHARE, "bytes": SIZE} | {key: EVALUATED[key] for key in shown}
    measured = [weights.get(tensor.layer_name, tensor) for _, tensor in tensors]
    numbers = _list_numbers(tensors, total, columns) | {key: _round_column(measured, key) for key in shown}
    return {
        **pack_columns(names, [status for status, _ in tensors], _list_words(tensors), numbers),
        "metrics": {key: metric._asdict() for key, metric in metrics.items()},
        "titles": WORDS,
        "evaluated": shown,
        "described": [_describe(name, declared) for name, declared in LAYER_METRICS.items() if "." not in name],
        "usual": {display(name): note.usual_snr_db for name, note in report.formats.items() if note.usual_snr_db},
        "findings": [_finding(finding, rows) for finding in pick_findings(report)],
        "found": _rows_by_finding(report.findings, rows),
        "details": _details(report, rows),
        "keep": _keep(report, rows, proposed, total),
    }


def _list_words(tensors: Sequence[tuple[int, Any]]) -> dict[str, list[str | None]]:
    return {
        "role": [display(getattr(tensor, "role", None) or role_of(tensor.layer_name)) for _, tensor in tensors],
        "format": [display(tensor.format) if hasattr(tensor, "format") else None for _, tensor in tensors],
        "shape": [_format_shape(getattr(tensor, "tensor_shape", None)) for _, tensor in tensors],
        "reason": [
            sentence(f"{tensor.side}: {tensor.reason}") if status == NOT_COMPARED else None
            for status, tensor in tensors
        ],
    }


def _describe(name: str, declared: Score) -> JsonObject:
    return {"name": name, "unit": "" if declared.unit == "share" else declared.unit, "formula": declared.formula}


def _list_numbers(tensors: Sequence[tuple[int, Any]], total: float, columns: Iterable[str]) -> JsonObject:
    errors = [tensor.squared_error if status == DIFFERS else None for status, tensor in tensors]
    entries = [tensor for _, tensor in tensors]
    return {
        "error_share": [
            round_digits(error / total, SHARE_DIGITS) if error is not None and total else None for error in errors
        ],
        "bytes": [
            tensor.bytes if status == NOT_COMPARED else find_sizes(tensor).quantized for status, tensor in tensors
        ],
        **{key: _round_column(entries, key) for key in columns},
    }


def _round_column(entries: Sequence[object], key: str) -> list[float | None]:
    values = (getattr(entry, key, None) for entry in entries)
    if key.endswith("snr_db"):
        return [None if value is None else round(value, DB_PLACES) for value in values]
    return [round_digits(value, DIGITS) for value in values]


@lru_cache(maxsize=1 << 10)  # cached, as many layers have the same shapes
def _format_shape(shape: tuple[int, ...] | None) -> str | None:
    return None if shape is None else " × ".join(map(str, shape)) or "scalar"


def _keep(report: Report, rows: Mapping[str, int], proposed: Sequence[KeptLayer], total: float) -> JsonObject:
    """Return layers ranked by error removed per extra byte, with the error and bytes of each."""
    free = list_keepable(report.layers, report.findings)
    ordered = order_by_worth(free, MAX_KEPT)
    return {
        "rows": [rows[layer.name] for layer in ordered],
        "shares": [round_digits(layer.error / total, MORE_DIGITS) for layer in ordered],
        "added": [layer.added for layer in ordered],
        "proposed": len(proposed),
        "bytes": report.quantized.bytes,
        "snr_db": report.aggregate.overall_snr_db,
        "dtype": find_common_dtype(report),
        "bound": len(report.layers) - len(free),
        "programs": [
            words._asdict() | {"quantized": [rows[name] for name in words.quantized] if words.quantized else None}
            for words in list_words(report, [layer.name for layer in ordered])
        ],
    }


def _iterate_tensors(report: Report) -> Iterator[tuple[int, Any]]:
    """Yield every tensor with a row in the table, and its status."""
    for status, entries in (
        (DIFFERS, report.layers),
        (CHANGED, report.other_changes),
        (IDENTICAL, report.lossless),
        (NOT_COMPARED, report.not_compared),
    ):
        for entry in entries:
            yield status, entry


def pick_findings(report: Report) -> list[Finding]:
    """Return the findings that fit into a page, the most severe first."""
    return sorted(report.findings, key=lambda finding: finding.rank)[:MAX_FINDINGS]


def _finding(finding: Finding, rows: Mapping[str, int]) -> JsonObject:
    return {
        "severity": finding.severity,
        "message": sentence(finding.message),
        "remedy": sentence(finding.remedy) if finding.remedy else None,
        "row": rows.get(finding.layer, -1) if finding.layer is not None else -1,
    }


def _rows_by_finding(findings: Sequence[Finding], rows: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the row indices of layers by finding code."""
    rows_by_code: dict[str, set[int]] = defaultdict(set)
    for finding in findings:
        if finding.layer is not None and finding.layer in rows:
            rows_by_code[finding.code].add(rows[finding.layer])
    return {display(code): sorted(its) for code, its in sorted(rows_by_code.items())}


def _details(report: Report, rows: Mapping[str, int]) -> JsonObject:
    """Return every field of the worst layers and of layers with a finding."""
    named = {finding.layer for finding in pick_findings(report)}
    measured = report.layers + report.other_changes
    worst = sort_layers(report.layers)[:MAX_DETAILED] + sort_layers(report.other_changes)[: MAX_DETAILED // 10]
    kept = {layer.layer_name: layer for layer in worst}
    kept |= {layer.layer_name: layer for layer in measured if layer.layer_name in named}
    keys = measured[0].__struct_fields__ if measured else ()
    in_table = {"layer_name", "display_name", "role", "block", "format", "tensor_shape"}
    return {
        "rows": [rows[name] for name in kept],
        "columns": {
            key: [_clean_value(getattr(layer, key)) for layer in kept.values()] for key in keys if key not in in_table
        },
    }


def _clean_value(value: Any) -> Any:
    """Return a value with rounded numbers and escaped text."""
    if isinstance(value, float):
        return round_digits(value, MORE_DIGITS)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return sentence(value)
    if isinstance(value, list | tuple):
        return [_clean_value(item) for item in value]
    if isinstance(value, dict):
        return {display(key): _clean_value(item) for key, item in value.items()}
    return {name: _clean_value(getattr(value, name)) for name in value.__struct_fields__}
