"""Documents as a section of a model card, between two comments by which a later version replaces it.

A card has the conclusion, the first table, warnings and errors; the summary of a CI job has all parts. Names may be
hostile, so markdown.py escapes them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from quanterr.documents.document import Result
from quanterr.outputs import BEGIN, END
from quanterr.outputs.formatting import format_doubts, say_once
from quanterr.outputs.markdown import format_code, format_prose, format_table, shorten_path
from quanterr.outputs.sections import CARD, FigureGroup, Findings, Lines, Name, Part, Table, View
from quanterr.util.text import count

TOP = 5  # layers
MAX_LISTED = 12  # rows in any other table or list


def write(document: Result, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write(make_section(document))


def make_section(document: Result) -> str:
    """Return the section of a model card with its comments: the first table, requested tables, warnings and errors.

    The section of a diff has all parts.
    """
    view: View = document.view(TOP)
    parts = [part for make_section in view.sections if CARD in make_section.media for part in make_section.parts]
    reasons = [reason.text for reason in view.reasons]
    tables = [part for part in parts if isinstance(part, Table) or (isinstance(part, FigureGroup) and part.shown)]
    requested = [part for part in tables if isinstance(part, Table) and part.is_asked_for]
    stated = [finding.message for finding in view.stated] if document.noun == "report" else []
    wrong: list[Part] = [part for part in parts if isinstance(part, Lines) and part.warn]
    wrong += [
        Findings(
            [
                (name, finding)
                for name, finding in part.listed
                if finding.severity != "info" and finding.message not in (*reasons, *stated)
            ]
        )
        for part in parts
        if isinstance(part, Findings)
    ]
    first = [part for part in tables if part not in requested][:1]
    shown = parts if document.noun == "diff" else [*first, *requested, *wrong]
    facts = {"".join(texts) for _, texts in view.facts}
    lines = view.summary if document.noun == "report" else []
    summary = [line for line in lines if line not in facts and not any(reason in line for reason in reasons)]
    return "\n".join([BEGIN, *_list_lines(view, reasons, shown, summary), END]) + "\n"


def format_numbers(document: Result) -> str:
    """Return all numbers for the summary of a job, which shows the results of gates separately."""
    view: View = document.view(TOP)
    parts = [part for make_section in view.sections if CARD in make_section.media for part in make_section.parts]
    reasons = [reason.text for reason in view.reasons if reason.by != "gate"]
    return "\n".join(_list_lines(view, reasons, parts)) + "\n"


def _list_lines(
    view: View, reasons: Sequence[str], parts: Iterable[Part], summary: Sequence[str] = ()
) -> Iterator[str]:
    yield f"## {view.heading}"
    yield ""
    # A pass without gates is not an approval.
    words = f"{view.done.capitalize()}, no limits set" if view.word == view.done else f"Verdict: {view.verdict}"
    words += format_prose(format_doubts(view.doubts)) if view.doubts else ""
    verdict = "" if view.word is None else f"**{words}**: "
    yield f"{verdict}{format_prose(view.conclusion)}"
    yield ""
    yield from (f"- {format_prose(reason)}" for reason in say_once(reasons)[:MAX_LISTED])
    if len(reasons) > MAX_LISTED:
        yield f"- and {count(len(reasons) - MAX_LISTED, 'more reason')}"
    yield from (f"- {format_prose(line)}" for line in summary)
    yield from (f"- {title}: {''.join(map(_format_cell, texts))}" for title, texts in view.facts)
    for part in parts:
        if lines := list(_format_part(part)):
            yield from ("", *lines)
    yield ""
    yield f"Made by {format_prose(view.made_by)}. {view.about}"


def _format_cell(text: str) -> str:
    return format_code(shorten_path(text)) if isinstance(text, Name) else format_prose(text)


def _format_part(part: Part) -> Iterator[str]:
    if isinstance(part, Table):
        yield from _format_table(part)
    elif isinstance(part, FigureGroup) and part.shown:
        rows = []
        for title, value, unit, note in part.shown:
            more = (f" {unit}" if unit else "") + (f"; {_format_cell(note)}" if note else "")
            rows.append([format_prose(title), f"{format_prose(value)}{more}"])
        yield from format_table([format_prose(part.title), ""], rows)
    elif isinstance(part, Findings):
        for name, finding in part.listed[:MAX_LISTED]:
            yield f"- {finding.severity}: {format_code(name) + ': ' if name else ''}{format_prose(finding.message)}"
        if len(part.listed) > MAX_LISTED:
            yield f"- and {count(len(part.listed) - MAX_LISTED, 'more finding')}"
    elif isinstance(part, Lines):
        yield from (f"- {format_prose(line)}" for line in part.lines)


def _format_table(part: Table) -> Iterator[str]:
    """Yield a table with its title, without the columns of bars that only terminals show."""
    kept = [0, *(n for n, column in enumerate(part.columns, 1) if not column.legend)]
    rows = [[_format_cell(row[n]) for n in kept] for row in part.rows[:MAX_LISTED]]
    more = part.more + len(part.rows) - len(rows)
    rows += [[f"and {more:,} more", *[""] * (len(kept) - 1)]] if more else []
    yield f"{format_prose(part.title)}:"
    yield ""
    yield from format_table([part.first, *(format_prose(part.columns[n - 1].header) for n in kept[1:])], rows)
