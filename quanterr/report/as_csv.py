"""The report as CSV: a line with the verdict and its reasons, then one for each tensor, compared or not.

All reports have the same columns; ``list`` says which list of the JSON report a line comes from.

A number is written in full; one that is undefined as nan, inf or -inf, one that does not apply as nothing.
A text that a spreadsheet would take for a formula gets an apostrophe before it (CWE-1236).
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from itertools import chain
from operator import attrgetter
from typing import IO, Any, cast

from quanterr.metrics import METRICS, NONFINITE, PERCENTILES
from quanterr.report.formatting import worst_expert
from quanterr.report.model import Layer, Report
from quanterr.util.text import display

MAX_NAME = 4096  # characters
UNUSUAL = frozenset(("elements", "absolute_error_percentiles", "worst_rows", "experts", "worst_element"))  # columns
NUMBERS = frozenset((float, int, type(None)))  # which are written as they are
LISTS = ("not_compared", "layers", "other_changes", "lossless")

# At the start, or after what a spreadsheet may take for the end of a cell; quotes and spaces it may take away.
_FORMULA = re.compile(r"(^|;)(?=[\s\"']*[=+\-@＝＋－＠])")


def write(report: Report, file: IO[str]) -> None:
    """Write it; the verdict is in every line, so that no extract of them loses it."""
    names, rows = columns(), csv.writer(file, lineterminator="\n")
    places = {name: place for place, name in enumerate(names)}

    def write_row(of_row: Iterable[tuple[str, Any]]) -> None:
        cells: list[Any] = [""] * len(names)
        for name, value in of_row:
            cells[places[name]] = value if value.__class__ in NUMBERS else cell(value)
        rows.writerow(cells)

    rows.writerow(names)
    whole = {"quanterr_verdict": report.verdict, "list": "report", "reason": "; ".join(report.reasons)}
    write_row(whole.items())
    codes: dict[str | None, list[str]] = defaultdict(list)
    for found in report.findings:
        codes[found.layer].append(found.code)
    for key in LISTS:
        for entry in getattr(report, key):
            description = {"quanterr_verdict": report.verdict, "list": key, "findings": codes.get(entry.layer_name)}
            write_row(chain(description.items(), values(entry)))


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
    names, get = _names_of(cast(Hashable, type(entry)))
    undefined = getattr(entry, "nonfinite", {})
    for name, value in zip(names, get(entry), strict=True):
        if name not in UNUSUAL:
            yield name, NONFINITE.get(undefined[name], value) if name in undefined else value
        elif name == "elements":
            yield "tensor_elements", value
        elif name == "absolute_error_percentiles":
            yield from ((f"{name}_{key}", getattr(value, key)) for key in PERCENTILES)
        elif name == "worst_rows":
            yield from (("worst_row", value[0].row), ("worst_row_snr_db", value[0].snr_db)) if value else ()
        elif name == "experts":
            if value:
                worst = worst_expert(value)
                yield from (("worst_expert", worst.expert), ("worst_expert_snr_db", worst.snr_db))
        elif name == "worst_element" and value is not None:
            yield from ((name, " ".join(map(str, value.index))), (f"{name}_x", value.x), (f"{name}_y", value.y))


@cache
def _names_of(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """The fields of an entry that are columns, and what gets their values."""
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind.model_fields)
    kept = [name for name in names if name not in ("display_name", "nonfinite", "bytes")]
    return kept, attrgetter(*kept)


def cell(value: Any) -> str | float | int | None:
    """What stands in a cell."""
    if isinstance(value, list | tuple):
        value = (" " if value and isinstance(value[0], str) else "x").join(map(str, value))
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else value
    return _text(value) if value else value


@lru_cache(maxsize=1 << 12)  # most texts are those of many layers
def _text(value: str) -> str:
    return _FORMULA.sub(r"\1'", display(value, MAX_NAME))
