"""Items of a report for CSV, pandas and JUnit: a row per tensor, compared or not, and tests for CI."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, cast

from quanterr.metrics import METRICS, NONFINITE, PERCENTILES
from quanterr.report.formatting import sentence
from quanterr.report.gate_results import drop_gate_messages
from quanterr.report.layers import BUCKETS, describe_coverage, find_worst_expert
from quanterr.report.model import Layer, Report
from quanterr.report.sections import Case, Suite
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display

UNUSUAL = frozenset(
    ("elements", "absolute_error_percentiles", "worst_rows", "experts", "worst_element")
)  # not plain columns
LISTS = ("not_compared", "layers", "other_changes", "lossless")
MAX_CASES = 1000  # shown of each kind


def rows(report: Report) -> Iterator[JsonObject]:
    """Yield CSV rows: the reasons of the verdict, then each tensor, compared or not."""
    yield {"list": "report", "reason": "; ".join(report.reasons)}
    codes: dict[str | None, list[str]] = defaultdict(list)
    for found in report.findings:
        codes[found.layer].append(found.code)
    for key in LISTS:
        for entry in getattr(report, key):
            yield {"list": key, "findings": codes.get(entry.layer_name), **values(entry)}


def values(entry: object) -> JsonObject:
    """Return the values of one tensor by column."""
    names, get = _find_columns(cast(Hashable, type(entry)))
    undefined = getattr(entry, "nonfinite", {})
    found: JsonObject = {}
    for name, value in zip(names, get(entry), strict=True):
        if name not in UNUSUAL:
            found[name] = NONFINITE.get(undefined[name], value) if name in undefined else value
        elif name == "elements":
            found["tensor_elements"] = value
        elif name == "absolute_error_percentiles":
            found |= {f"{name}_{key}": getattr(value, key) for key in PERCENTILES}
        elif name == "worst_rows" and value:
            found |= {"worst_row": value[0].row, "worst_row_snr_db": value[0].snr_db}
        elif name == "experts" and value:
            worst = find_worst_expert(value)
            found |= {"worst_expert": worst.expert, "worst_expert_snr_db": worst.snr_db}
        elif name == "worst_element" and value is not None:
            found |= {name: " ".join(map(str, value.index)), f"{name}_x": value.x, f"{name}_y": value.y}
    return found


@cache
def _find_columns(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """Return the names of the fields that become columns, and a getter of their values."""
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind.model_fields)
    kept = [name for name in names if name not in ("display_name", "nonfinite", "bytes")]
    return kept, attrgetter(*kept)


def suites(report: Report) -> list[Suite]:
    """Return the JUnit suites: one for the comparison and its reliability, and one for gates."""
    gates = [Suite("gates", [], report.gates)] if report.gates else []
    return [Suite("comparison", list(_cases(report))), *gates]


def _cases(report: Report) -> Iterator[Case]:
    own = drop_gate_messages(report.reasons, report.gates)
    reasons = "\n".join(map(sentence, own or (report.reasons[:1] if report.verdict == "inconclusive" else [])))
    problem, message = "", ""
    if report.verdict == "inconclusive":
        problem, message = "error", f"inconclusive: {reasons.partition(chr(10))[0]}"
    elif report.verdict == "fail" and not any(g.status == "fail" and g.severity == "error" for g in report.gates):
        problem, message = "failure", "fail"
    said = "" if problem or not reasons else f"\n{reasons}"
    name, output = "everything selected was compared reliably", f"{describe_coverage(report)}{said}"
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
            yield {"list": key} | values(entry)
