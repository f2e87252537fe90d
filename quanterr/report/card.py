"""Documents as a section of a model card, between two comments, so that the next one can take its place.

Names are hostile: see markdown.py.
"""

from collections.abc import Iterator
from typing import IO

from quanterr.errors import UsageError
from quanterr.report.formatting import gate_words, judged
from quanterr.report.markdown import code, located, of_verdict, prose, table
from quanterr.report.sections import Findings, Gates, Name, Part, Shown, Table, View

BEGIN, END = "<!-- quanterr:begin -->", "<!-- quanterr:end -->"
TOP = 5  # layers
MAX_LISTED = 10  # rows of any other kind


def write(document: Shown, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write("\n".join([BEGIN, *_lines(document), END]) + "\n")


def updated(text: str, section: str, where: str, append: bool = False) -> str:
    """A document with the section in the place of what stood between its comments.

    ``append``: at the end of a document that has no such comments.

    Raises:
        UsageError: not exactly one pair of comments, each on a line of its own.
    """
    lines = text.splitlines(keepends=True)
    found = [(n, mark) for n, line in enumerate(lines) if (mark := line.strip("\ufeff \t\r\n")) in (BEGIN, END)]
    if not found and append:
        return _appended(text, section)
    if not found:
        raise UsageError(
            f"{where}: has no place for the report; give --append to put it at the end, or add two lines where it "
            f"belongs: {BEGIN} and {END}"
        )
    if [mark for _, mark in found] != [BEGIN, END]:
        description = ", ".join(f"line {n + 1}: {mark}" for n, mark in found)
        raise UsageError(
            f"{where}: needs {BEGIN} once and {END} once after it, each on its own line; it has {description}"
        )
    first, last = found[0][0], found[1][0]
    newline = "\r\n" if lines[first].endswith("\r\n") else "\n"
    before = "".join(lines[:first]) + ("\ufeff" if lines[first].startswith("\ufeff") else "")
    ending = "" if lines[last].endswith("\n") else newline
    made = section.replace("\n", newline)
    return before + (made.removesuffix(newline) if ending else made) + "".join(lines[last + 1 :])


def _appended(text: str, section: str) -> str:
    """With a blank line before the section, and line ends as they are there."""
    newline = "\r\n" if "\r\n" in text else "\n"
    ends = "" if not text or text.endswith("\n") else newline
    return f"{text}{ends}{newline if text else ''}{section.replace(chr(10), newline)}"


def _lines(document: Shown) -> Iterator[str]:
    view = document.view(TOP)
    yield f"## {view.heading}"
    yield ""
    verdict = "" if view.word is None else f"**{_verdict(view)}**: "
    yield f"{verdict}{prose(view.conclusion)}"
    yield ""
    yield from (f"- {prose(reason)}" for reason in view.reasons[:MAX_LISTED])
    yield from _facts(view)
    for section in view.sections:
        for part in () if section.is_detail else section.parts:
            yield ""
            yield from _part(part)
    yield ""
    yield f"Made by {prose(view.made_by)}. {view.about}"


def _verdict(view: View) -> str:
    return of_verdict("" if view.word == view.done else view.verdict or "", view.done, view.doubts)


def _facts(view: View) -> Iterator[str]:
    for title, texts in view.facts:
        yield f"- {title}: {''.join(map(_cell, texts))}"


def _cell(text: str) -> str:
    return code(located(text)) if isinstance(text, Name) else prose(text)


def _part(part: Part) -> Iterator[str]:
    if isinstance(part, Table):
        yield f"{prose(part.title)}:"
        yield ""
        rows = [list(map(_cell, row)) for row in part.rows[:MAX_LISTED]]
        more = part.more + len(part.rows) - len(rows)
        rows += [[f"and {more:,} more", *[""] * len(part.columns)]] if more else []
        yield from table([part.first, *(prose(column.header) for column in part.columns)], rows)
    elif isinstance(part, Findings):
        for name, found in part.found[:MAX_LISTED]:
            yield f"- {found.severity}: {code(name) + ': ' if name else ''}{prose(found.message)}"
    elif isinstance(part, Gates):
        rows = [
            [code(name), code(gate.require), gate_words(gate)[0], judged(gate.observed, gate.limit)]
            for name, gate in part.judged
        ]
        yield from table(["candidate", "condition", "verdict", "observed"], rows)
    else:
        yield from (f"- {prose(line)}" for line in part.lines)
