"""What a notebook shows of a report or a ranking: a line of text, a compact table, a data frame."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any

from quanterr.errors import UsageError
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

Frame = Any  # a pandas.DataFrame: pandas is optional
WORST = 10  # layers of a table
RIGHT = ' style="text-align: right"'


def frame(rows: Iterable[JsonObject]) -> Frame:
    """Rows as a pandas.DataFrame.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise UsageError("to_pandas() needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def heading(verdict: str, reasons: Sequence[str]) -> str:
    """The verdict with its reasons."""
    said = "; ".join(escape(display(reason, 2000)) for reason in reasons[:3])
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    return f"<p><b>{escape(verdict)}</b>: {said}{more}</p>"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table with a caption. ``words`` columns hold words, the others numbers."""
    align = [""] * words + [RIGHT] * (len(headers) - words)
    head = "".join(f"<th{a}>{escape(header)}</th>" for header, a in zip(headers, align, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{a}>{escape(display(cell))}</td>' for cell, a in zip(row, align, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
