"""Items of a report for CSV, pandas and JUnit: a row per tensor, compared or not, and tests for CI."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

from quanterr.documents.comparison.layer import Layer
from quanterr.documents.comparison.model import Report
from quanterr.documents.gate_results import list_other_reasons
from quanterr.metrics import NONFINITE, PERCENTILES
from quanterr.outputs.formatting import sentence
from quanterr.outputs.sections import Case, Suite
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display
from quanterr.views.comparison.layers import BUCKETS, describe_coverage, find_worst_expert


class Split(NamedTuple):
    """Columns whose values are computed from a field; they are left out where the field is None or empty."""

    columns: tuple[str, ...]
    of: Callable[[Any], Sequence[object]]


SPLITS = {
    "worst_rows": Split(("worst_row", "worst_row_snr_db"), lambda rows: (rows[0].row, rows[0].snr_db)),
    "experts": Split(
        ("worst_expert", "worst_expert_snr_db"), lambda every: attrgetter("expert", "snr_db")(find_worst_expert(every))
    ),
    "worst_element": Split(
        ("worst_element", "worst_element_x", "worst_element_y"),
        lambda element: (" ".join(map(str, element.index)), element.x, element.y),
    ),
}
PATHS = {  # field → column → path of its value, where these names differ
    "elements": {"tensor_elements": "elements"},
    "absolute_error_percentiles": {
        f"absolute_error_percentiles_{key}": f"absolute_error_percentiles.{key}" for key in PERCENTILES
    },
    **{name: dict.fromkeys(split.columns, name) for name, split in SPLITS.items()},
}
LISTS = ("not_compared", "layers", "other_changes", "lossless")
MAX_CASES = 1000  # cases of each kind


def rows(report: Report) -> Iterator[JsonObject]:
    """Yield CSV rows: the reasons of the verdict, then each tensor, compared or not."""
    yield {"list": "report", "reason": "; ".join(report.reasons)}
    codes: dict[str | None, list[str]] = defaultdict(list)
    for finding in report.findings:
        codes[finding.layer].append(finding.code)
    for key in LISTS:
        for entry in getattr(report, key):
            yield {"list": key, "findings": codes.get(entry.layer_name), **values(entry)}


def values(entry: object) -> JsonObject:
    """Return the values of one tensor by column."""
    columns, get, splits = _find_columns(cast(Hashable, type(entry)))
    row = dict(zip(columns, get(entry), strict=True))
    for split in splits:
        if whole := row[split.columns[0]]:
            row |= zip(split.columns, split.of(whole), strict=True)
        else:
            for column in split.columns:
                del row[column]
    for name, word in getattr(entry, "nonfinite", {}).items():
        if name in row and row[name] is None:  # metrics that are written as null
            row[name] = NONFINITE.get(word)
    return row


@cache
def _find_columns(entry_type: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[Split]]:
    """Return the columns of a kind of tensor, a getter of their values, and the splits among them.

    The getter returns the whole field for each column of a split.
    """
    names = entry_type.__struct_fields__
    paths: dict[str, str] = {}
    for name in names:
        if name not in ("display_name", "nonfinite", "bytes"):
            paths |= PATHS.get(name, {name: name})
    return list(paths), attrgetter(*paths.values()), [split for name, split in SPLITS.items() if name in names]


def suites(report: Report) -> list[Suite]:
    """Return the JUnit suites: one for the comparison and its reliability, and one for gates."""
    gates = [Suite("gates", [], report.gates)] if report.gates else []
    return [Suite("comparison", list(_cases(report))), *gates]


def _cases(report: Report) -> Iterator[Case]:
    other_reasons = list_other_reasons(report)
    reasons = "\n".join(
        map(sentence, other_reasons or (report.reasons[:1] if report.verdict == "inconclusive" else []))
    )
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
    errors = [finding for finding in report.findings if finding.severity == "error"]
    for finding in errors[:MAX_CASES]:
        name, remedy = display(finding.layer or "whole model"), sentence(finding.remedy) if finding.remedy else ""
        yield Case(f"comparison.{display(finding.code)}", name, "error", sentence(finding.message), remedy)
    yield from _count_more(len(errors), "error", "errors")


def _count_more(n: int, singular: str, plural: str) -> Iterator[Case]:
    """Yield a case that counts the cases left out."""
    if n > MAX_CASES:
        name = f"and {count(n - MAX_CASES, 'more ' + singular, 'more ' + plural)}"
        yield Case("comparison", name, "error", "too many to list; the JSON report has them all")


CSV_COLUMNS = [
    *("quanterr_verdict", "list", "layer_name", "bucket", "side", "reason"),
    *(column for column in _find_columns(Layer)[0] if column != "layer_name"),
    "findings",
]


def frame_rows(report: Report) -> Iterator[JsonObject]:
    """Yield the rows of a data frame, one per tensor, compared or not."""
    for key in LISTS:
        for entry in getattr(report, key):
            yield {"list": key} | values(entry)
