"""HTML of results in notebooks."""

from html import escape

from quanterr.documents.document import Result
from quanterr.outputs.formatting import format_doubts, sentence
from quanterr.outputs.sections import TERMINAL, Table, View
from quanterr.util.text import display

WORST = 10  # layers in a table
ROWS = 50  # rows in any table
REASONS = 3
RIGHT = ' style="text-align: right"'


def render(result: Result) -> str:
    """Return the conclusion of a result and the tables that terminals also show."""
    view = result.view(WORST)
    shown = [section for section in view.sections if TERMINAL in section.media]
    tables = [part for section in shown for part in section.parts if isinstance(part, Table)]
    return _render_heading(view) + "".join(map(_render_table, tables))


def _render_heading(view: View) -> str:
    """Return the conclusion of a view with doubts and the first reasons."""
    said = "; ".join(escape(sentence(reason)) for reason in (view.conclusion, *view.reasons[:REASONS]))
    more = f" (and {len(view.reasons) - REASONS} more)" if len(view.reasons) > REASONS else ""
    word = "" if view.word is None else f"<b>{escape(view.word + format_doubts(view.doubts))}</b>: "
    return f"<p>{word}{said}{more}</p>"


def _render_table(one: Table) -> str:
    """Return a table of a view with its title as caption, without columns that only terminals draw."""
    kept = [n for n, column in enumerate(one.columns) if not column.legend]
    align = ["", *(RIGHT if one.columns[n].right else "" for n in kept)]
    rows = [[row[0], *(row[n + 1] for n in kept)] for row in one.rows[:ROWS]]
    heads = [one.first, *(one.columns[n].header for n in kept)]
    head = "".join(f"<th{a}>{escape(header)}</th>" for header, a in zip(heads, align, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{a}>{escape(display(cell))}</td>' for cell, a in zip(row, align, strict=True))}</tr>"
        for row in rows
    )
    caption = f"<caption>{escape(sentence(one.title))}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
