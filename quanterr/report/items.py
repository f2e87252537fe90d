"""Items of a report for CSV, pandas and JUnit: a row per tensor, compared or not, and tests for CI."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from quanterr.metrics import METRICS, NONFINITE, PERCENTILES
from quanterr.report.formatting import sentence
from quanterr.report.layers import BUCKETS, describe_coverage, find_worst_expert
from quanterr.report.model import Layer, Report
from quanterr.report.sections import Case, Cells, Suite
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display

LISTS = ("not_compared", "layers", "other_changes", "lossless")
MAX_CASES = 1000  # shown of each kind


def rows(report: Report) -> Iterator[Cells]:
    """Yield CSV rows: the verdict with its reasons, then each tensor, compared or not."""
    yield {"quanterr_verdict": report.verdict, "list": "report", "reason": "; ".join(report.reasons)}.items()
    codes: dict[str | None, list[str]] = defaultdict(list)
    for found in report.findings:
        codes[found.layer].append(found.code)
    for key in LISTS:
        for entry in getattr(report, key):
            description = {"quanterr_verdict": report.verdict, "list": key, "findings": codes.get(entry.layer_name)}
            yield chain(description.items(), values(entry))


def values(entry: object) -> Iterator[tuple[str, object]]:
    """Yield the columns of one tensor with their values; infinite and NaN ones come a second time, as numbers."""
    parts, names = _find_columns(cast(Hashable, type(entry)))
    found = chain.from_iterable(part(entry) for part in parts)
    undefined = getattr(entry, "nonfinite", {})
    if not undefined:
        return found
    numbers = ((name, NONFINITE[word]) for name, word in undefined.items() if name in names and word in NONFINITE)
    return chain(found, numbers)


@cache
def _find_columns(kind: Any) -> tuple[list[Callable[[Any], Iterable[tuple[str, object]]]], frozenset[str]]:
    """Return functions that return columns with their values, in order, and the names of plain columns."""
    parts: list[Callable[[Any], Iterable[tuple[str, object]]]] = []
    paths: dict[str, str] = {}  # column → attribute
    plain: list[str] = []
    for name in [f.name for f in fields(kind)] if is_dataclass(kind) else kind.model_fields:
        if name in UNUSUAL:
            parts += [_make_getter(paths), UNUSUAL[name]]
            paths = {}
        elif name == "absolute_error_percentiles":
            paths |= {f"{name}_{key}": f"{name}.{key}" for key in PERCENTILES}
        elif name not in ("display_name", "nonfinite", "bytes"):
            paths["tensor_elements" if name == "elements" else name] = name
            plain.append(name)
    return [*parts, _make_getter(paths)], frozenset(plain)


def _make_getter(paths: Mapping[str, str]) -> Callable[[Any], Iterable[tuple[str, object]]]:
    """Return a function that returns columns with the values of these attributes."""
    if len(paths) < 2:  # then attrgetter returns no tuple
        return lambda entry: [(name, attrgetter(path)(entry)) for name, path in paths.items()]
    names, get = list(paths), attrgetter(*paths.values())
    return lambda entry: zip(names, get(entry), strict=True)


def _list_worst_row(layer: Layer) -> list[tuple[str, object]]:
    worst = layer.worst_rows
    return [("worst_row", worst[0].row), ("worst_row_snr_db", worst[0].snr_db)] if worst else []


def _list_worst_expert(layer: Layer) -> list[tuple[str, object]]:
    if not layer.experts:
        return []
    worst = find_worst_expert(layer.experts)
    return [("worst_expert", worst.expert), ("worst_expert_snr_db", worst.snr_db)]


def _list_worst_element(layer: Layer) -> list[tuple[str, object]]:
    name, worst = "worst_element", layer.worst_element
    if worst is None:
        return []
    return [(name, " ".join(map(str, worst.index))), (f"{name}_x", worst.x), (f"{name}_y", worst.y)]


UNUSUAL = {
    "worst_rows": _list_worst_row,
    "experts": _list_worst_expert,
    "worst_element": _list_worst_element,
}  # fields that become other columns


def suites(report: Report) -> list[Suite]:
    """Return the JUnit suites: one for the comparison and its reliability, and one for gates."""
    gates = [Suite("gates", [], report.gates)] if report.gates else []
    return [Suite("comparison", list(_cases(report))), *gates]


def _cases(report: Report) -> Iterator[Case]:
    reasons = "\n".join(sentence(reason) for reason in report.reasons)
    problem, message = "", ""
    if report.verdict == "inconclusive":
        problem, message = "error", f"inconclusive: {sentence(report.reasons[0]) if report.reasons else ''}"
    elif report.verdict == "fail" and not any(g.status == "fail" and g.severity == "error" for g in report.gates):
        problem, message = "failure", "fail"
    name, output = "everything selected was compared reliably", f"{describe_coverage(report)}\n{reasons}"
    yield Case("comparison", name, problem, message, reasons, output)
    for item in report.not_compared[:MAX_CASES]:
        message = f"not compared: {BUCKETS.get(item.bucket, display(item.bucket))}"
        name = display(item.layer_name)
        yield Case(f"comparison.{item.side}", name, "error", message, sentence(item.reason))
    yield from _count_more(len(report.not_compared), "tensor was not compared", "tensors were not compared")
    errors = [found for found in report.findings if found.severity == "error"]
    for found in errors[:MAX_CASES]:
        name, remedy = display(found.layer or "whole model"), sentence(found.remedy) if found.remedy else ""
        yield Case(f"comparison.{display(found.code)}", name, "error", sentence(found.message), remedy)
    yield from _count_more(len(errors), "error", "errors")


def _count_more(n: int, one: str, many: str) -> Iterator[Case]:
    """Yield a case that counts the cases left out."""
    if n > MAX_CASES:
        name = f"and {count(n - MAX_CASES, 'more ' + one, 'more ' + many)}"
        yield Case("comparison", name, "error", "too many to list; the JSON report has them all")


def _list_columns() -> list[str]:
    """Return the CSV columns in order."""
    names = ["quanterr_verdict", "list", "layer_name", "bucket", "side", "reason"]
    metrics = {row.name: row.kind for row in METRICS}
    for field in fields(Layer):
        kind = metrics.get(field.name, "")
        if kind == "percentiles":
            names += [f"{field.name}_{key}" for key in PERCENTILES]
        elif kind == "rows":
            names += ["worst_row", "worst_row_snr_db"]
        elif kind == "experts":
            names += ["worst_expert", "worst_expert_snr_db"]
        elif field.name == "worst_element":
            names += ["worst_element", "worst_element_x", "worst_element_y"]
        elif field.name not in ("layer_name", "display_name", "nonfinite"):
            names.append(field.name)
    return [*names, "findings"]


CSV_COLUMNS = _list_columns()


def frame_rows(report: Report) -> Iterator[JsonObject]:
    """Yield the rows of a data frame, one per tensor, compared or not."""
    for key in LISTS:
        for entry in getattr(report, key):
            yield {"list": key} | dict(values(entry))
