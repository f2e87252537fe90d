"""Items of a report for CSV, pandas and JUnit: a row per tensor, compared or not, and tests for CI."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

from quanterr.metrics import NONFINITE, PERCENTILES
from quanterr.report.formatting import sentence
from quanterr.report.gate_results import drop_gate_messages
from quanterr.report.layers import BUCKETS, describe_coverage, find_worst_expert
from quanterr.report.model import Layer, Report
from quanterr.report.sections import Case, Suite
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display


class Split(NamedTuple):
    """A field that has several columns, or another name as a column."""

    columns: tuple[str, ...]
    of: Callable[[Any], Sequence[object]]


SPLITS = {
    "elements": Split(("tensor_elements",), lambda n: (n,)),
    "absolute_error_percentiles": Split(
        tuple(f"absolute_error_percentiles_{key}" for key in PERCENTILES), attrgetter(*PERCENTILES)
    ),
    "worst_rows": Split(("worst_row", "worst_row_snr_db"), lambda rows: (rows[0].row, rows[0].snr_db)),
    "experts": Split(
        ("worst_expert", "worst_expert_snr_db"), lambda every: attrgetter("expert", "snr_db")(find_worst_expert(every))
    ),
    "worst_element": Split(
        ("worst_element", "worst_element_x", "worst_element_y"),
        lambda one: (" ".join(map(str, one.index)), one.x, one.y),
    ),
}
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
        if name not in SPLITS:
            found[name] = NONFINITE.get(undefined[name], value) if name in undefined else value
        elif value not in (None, ()):
            found |= zip(SPLITS[name].columns, SPLITS[name].of(value), strict=True)
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


CSV_COLUMNS = [
    *("quanterr_verdict", "list", "layer_name", "bucket", "side", "reason"),
    *(
        column
        for name in _find_columns(Layer)[0]
        if name != "layer_name"
        for column in (SPLITS[name].columns if name in SPLITS else (name,))
    ),
    "findings",
]


def frame_rows(report: Report) -> Iterator[JsonObject]:
    """Yield the rows of a data frame, one per tensor, compared or not."""
    for key in LISTS:
        for entry in getattr(report, key):
            yield {"list": key} | values(entry)
