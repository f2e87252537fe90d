"""Documents as a section of a model card, between two comments that mark it for replacement.

Names may be hostile: see markdown.py.
"""

from collections.abc import Iterator
from typing import IO

from quanterr.documents.document import Result
from quanterr.documents.gate_results import drop_gate_messages
from quanterr.outputs import BEGIN, END
from quanterr.outputs.formatting import describe_gate, format_doubts, format_observed
from quanterr.outputs.markdown import format_code, format_prose, shorten_path, table
from quanterr.outputs.sections import CARD, Figure, FigureGroup, Findings, Gates, Lines, Name, Part, Table, View
from quanterr.util.text import count

TOP = 5  # layers
MAX_LISTED = 10  # rows in any other table or list


def write(document: Result, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write(section(document))


def section(document: Result) -> str:
    """Return the section of a model card, with its comments."""
    return f"{BEGIN}\n{format_numbers(document)}{END}\n"


def format_numbers(document: Result, *, gates: bool = True) -> str:
    """Return the section without its comments, and without the results of gates if ``gates`` is False."""
    return "\n".join(_lines(document, gates)) + "\n"


def _lines(document: Result, gates: bool) -> Iterator[str]:
    view = document.view(TOP)
    yield f"## {view.heading}"
    yield ""
    verdict = "" if view.word is None else f"**{_verdict(view)}**: "
    yield f"{verdict}{format_prose(view.conclusion)}"
    yield ""
    reasons = view.reasons if gates else drop_gate_messages(view.reasons, view.gates)
    yield from (f"- {format_prose(reason)}" for reason in reasons[:MAX_LISTED])
    if len(reasons) > MAX_LISTED:
        yield f"- and {count(len(reasons) - MAX_LISTED, 'more reason')}"
    yield from (f"- {title}: {''.join(map(_cell, texts))}" for title, texts in view.facts)
    for section in view.sections:
        for part in section.parts if CARD in section.media else ():
            if (gates or not isinstance(part, Gates)) and (lines := list(_part(part))):
                yield from ("", *lines)
    yield ""
    yield f"Made by {format_prose(view.made_by)}. {view.about}"


def _verdict(view: View) -> str:
    """Return "Verdict: fail", or "Compared, no limits set" for a pass without gates, followed by any doubts."""
    words = f"{view.done.capitalize()}, no limits set" if view.word == view.done else f"Verdict: {view.verdict}"
    return f"{words}{format_prose(format_doubts(view.doubts))}" if view.doubts else words


def _cell(text: str) -> str:
    return format_code(shorten_path(text)) if isinstance(text, Name) else format_prose(text)


def _part(part: Part) -> Iterator[str]:
    if isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, FigureGroup) and part.shown:
        yield from table(
            [format_prose(part.title), ""], ([format_prose(one.title), _figure(one)] for one in part.shown)
        )
    elif isinstance(part, Findings):
        for name, found in part.found[:MAX_LISTED]:
            yield f"- {found.severity}: {format_code(name) + ': ' if name else ''}{format_prose(found.message)}"
        if len(part.found) > MAX_LISTED:
            yield f"- and {count(len(part.found) - MAX_LISTED, 'more finding')}"
    elif isinstance(part, Gates):
        yield from _gates(part)
    elif isinstance(part, Lines):
        yield from (f"- {format_prose(line)}" for line in part.lines)


def _table(part: Table) -> Iterator[str]:
    """Yield a table with its title, without columns that only terminals draw."""
    kept = [0, *(n for n, column in enumerate(part.columns, 1) if not column.legend)]
    rows = [[_cell(row[n]) for n in kept] for row in part.rows[:MAX_LISTED]]
    more = part.more + len(part.rows) - len(rows)
    rows += [[f"and {more:,} more", *[""] * (len(kept) - 1)]] if more else []
    yield f"{format_prose(part.title)}:"
    yield ""
    yield from table([part.first, *(format_prose(part.columns[n - 1].header) for n in kept[1:])], rows)


def _figure(one: Figure) -> str:
    unit, note = (f" {one.unit}" if one.unit else ""), (f"; {_cell(one.note)}" if one.note else "")
    return f"{format_prose(one.value)}{unit}{note}"


def _gates(part: Gates) -> Iterator[str]:
    """Yield a table of gates, violated ones first; candidates and gate names get columns if needed."""
    ordered = sorted(part.judged, key=lambda one: one[1].status)
    candidates, named = any(name for name, _ in ordered), any(gate.id != gate.require for _, gate in ordered)
    rows = [
        [
            *([format_code(name)] if candidates else []),
            *([format_prose(gate.id) if gate.id != gate.require else ""] if named else []),
            format_code(gate.require),
            describe_gate(gate)[0],
            format_observed(gate.observed, gate.limit),
            format_observed(gate.margin, 0),
        ]
        for name, gate in ordered
    ]
    heads = [*(["candidate"] if candidates else []), *(["gate"] if named else [])]
    if rows:
        yield from table([*heads, "condition", "verdict", "observed", "margin"], rows)
