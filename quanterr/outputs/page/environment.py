"""The environment of all templates, with the filters and functions that they call.

Names may be hostile, so templates escape every text except the page's style and script, and what this module marks as
HTML.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from quanterr.documents.base import Finding
from quanterr.documents.finding_codes import CODES
from quanterr.documents.gate_results import Gate
from quanterr.outputs import dots
from quanterr.outputs.formatting import (
    MAX_SENTENCE_LENGTH,
    describe_gate,
    describe_violation,
    format_doubts,
    format_observed,
    has_only_numbers,
    sentence,
)
from quanterr.outputs.markdown import shorten_path
from quanterr.outputs.page.chart import HEIGHT, LEFT, WIDTH, draw_chart
from quanterr.outputs.sections import Findings, LayerName, Name, Part, Table
from quanterr.util.text import count, display, format_exact, size

FOLDER = Path(__file__).parent / "templates"
MANY_ROWS, FIRST_ROWS = 20, 10  # a table with more rows shows only the first ones until it is unfolded
MAX_LISTED = 200  # findings and reasons
CONSTANTS = {
    "WIDTH": WIDTH,
    "HEIGHT": HEIGHT,
    "LEFT": LEFT,
    "DOTS": dots,
    "MAX_LISTED": MAX_LISTED,
    "MAX_VIOLATIONS": 20,
    "NOTHING": ("-", "–"),  # cells without a value
    "SIGNS": {"pass": "✓", "fail": "✕", "inconclusive": "?", "info": "›"},
}


@cache
def environment() -> Environment:
    """Return the environment of all templates."""
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    filters = (cell, count, display, fact, link_names, sentence, size)
    functions = (describe_gate, describe_violation, draw_chart, dots.draw_dots, fold, format_doubts, format_exact,
                 format_observed, has_only_numbers, kind_of, order_findings, title_of, zip)  # fmt: skip
    made.filters |= {function.__name__: function for function in filters} | {"thousands": "{:,}".format}
    made.globals |= (
        {function.__name__: function for function in functions}
        | {"CODES": CODES, "MAX_SENTENCE_LENGTH": MAX_SENTENCE_LENGTH}
        | CONSTANTS
    )
    return made


def kind_of(part: Part) -> str:
    """Return the name of the template of a part, ``parts/<kind>.html``."""
    return type(part).__name__.lower()


def link_layer(name: str) -> Markup:
    """Return a link from a layer's name, which may break after dots and underscores, to its details."""
    text = display(name)
    breakable = Markup("<wbr>").join(re.split(r"(?<=[._])", text))
    return Markup('<a class="layer" href="#layer={}">{}</a>').format(quote(text, safe=""), breakable)


def link_names(text: str, names: Iterable[str | None]) -> Markup:
    """Return a sentence with links for all occurrences of the given layer names."""
    shown = sorted({display(name) for name in names if name is not None}, key=len, reverse=True)
    if not shown:
        return escape(text)
    fragments = re.split(f"({'|'.join(map(re.escape, shown))})", text)
    return Markup("").join(link_layer(fragment) if n % 2 else fragment for n, fragment in enumerate(fragments))


def cell(text: str) -> str:
    """Return a text of a view, with a link if it is a layer's name; a name may break anywhere."""
    if isinstance(text, LayerName):
        return link_layer(text)
    shown = sentence(text)
    return Markup('<span class="name">{}</span>').format(shown) if isinstance(text, Name) else shown


def fact(text: str) -> str:
    """Return a text about a file without the file's folder, as pages may be published."""
    return cell(Name(shorten_path(text)) if isinstance(text, Name) else text)


class Folded(NamedTuple):
    """A table as a page shows it: headings, each with whether its column has numbers, shown rows and folded rows."""

    style: str
    heads: list[tuple[str, bool]]
    shown: list[list[str]]
    folded: list[list[str]]
    summary: str  # summary of the folded rows


def fold(table: Table) -> Folded:
    """Return a table without the columns that only terminals draw, with minor rows and most of a long table folded."""
    kept = [n for n, column in enumerate(table.columns) if not column.legend]
    heads = [(table.first, False), *((table.columns[n].header, table.columns[n].right) for n in kept)]
    rows = [[cell(row[0]), *(cell(row[n + 1]) for n in kept)] for row in table.rows]
    has_numbers = any(is_number for _, is_number in heads)
    major = len(rows) - table.minor
    summary = f"{count(table.minor, 'row')} {table.minor_because}"
    if major > MANY_ROWS:
        major = FIRST_ROWS
        summary = f"{count(len(rows) - major, 'more row')}"
    return Folded("rows" if has_numbers or not kept else "stack", heads, rows[:major], rows[major:], summary)


def order_findings(findings: Findings) -> list[tuple[str, Finding]]:
    """Return the findings, the most severe first."""
    return sorted(findings.listed, key=lambda named: named[1].rank)


def title_of(name: str, gate: Gate) -> str:
    """Return the title of a gate: the candidate's name, if given, and the id, if it differs from the condition."""
    return ": ".join(map(display, [name] * bool(name) + [gate.id] * (gate.id != gate.require)))
