"""The report as CSV: a line with the verdict and its reasons, then one for each tensor, compared or not.

All reports have the same columns; ``list`` says which list of the JSON report a line comes from.

A number is written in full; one that is undefined as nan, inf or -inf, one that does not apply as nothing.
A text that a spreadsheet would take for a formula gets an apostrophe before it (CWE-1236).
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import IO, Any

from quanterr.metrics import METRICS, NONFINITE, PERCENTILES
from quanterr.report.formatting import worst_expert
from quanterr.report.model import Layer, Report
from quanterr.util.text import display

MAX_NAME = 4096  # characters
LISTS = ("not_compared", "layers", "other_changes", "lossless")

# At the start, or after what a spreadsheet may take for the end of a cell; quotes and spaces it may take away.
_FORMULA = re.compile(r"(^|;)(?=[\s\"']*[=+\-@＝＋－＠])")


def write(report: Report, file: IO[str]) -> None:
    """Write it; the verdict is in every line, so that no extract of them loses it."""
    rows = csv.DictWriter(file, columns(), restval="", lineterminator="\n")
    rows.writeheader()
    whole = {"quanterr_verdict": report.verdict, "list": "report", "reason": "; ".join(report.reasons)}
    rows.writerow({name: cell(value) for name, value in whole.items()})
    codes: dict[str | None, list[str]] = defaultdict(list)
    for found in report.findings:
        codes[found.layer].append(found.code)
    for key in LISTS:
        for entry in getattr(report, key):
            description = {"quanterr_verdict": report.verdict, "list": key, "findings": codes.get(entry.layer_name)}
            rows.writerow({name: cell(value) for name, value in (description | dict(values(entry))).items()})


def columns() -> list[str]:
    """Their names, in order."""
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


def values(entry: Any) -> Iterator[tuple[str, Any]]:
    """Columns of one tensor with their values."""
    known = vars(entry) if hasattr(entry, "__dict__") else {f.name: getattr(entry, f.name) for f in fields(entry)}
    undefined = known.get("nonfinite", {})
    for name, value in known.items():
        if name in ("display_name", "nonfinite", "bytes"):
            continue
        if name == "elements":
            yield "tensor_elements", value
        elif name == "absolute_error_percentiles":
            yield from ((f"{name}_{key}", getattr(value, key)) for key in PERCENTILES)
        elif name == "worst_rows":
            yield from (("worst_row", value[0].row), ("worst_row_snr_db", value[0].snr_db)) if value else ()
        elif name == "experts":
            if value:
                worst = worst_expert(value)
                yield from (("worst_expert", worst.expert), ("worst_expert_snr_db", worst.snr_db))
        elif name == "worst_element":
            if value is not None:
                yield from ((name, " ".join(map(str, value.index))), (f"{name}_x", value.x), (f"{name}_y", value.y))
        else:
            yield name, NONFINITE.get(undefined.get(name, ""), value)


def cell(value: Any) -> str | float | int | None:
    """What stands in a cell."""
    if isinstance(value, list | tuple):
        value = (" " if value and isinstance(value[0], str) else "x").join(map(str, value))
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else value
    return _FORMULA.sub(r"\1'", display(value, MAX_NAME)) if value else value
