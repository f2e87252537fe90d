"""Names and sentences as plain text in Markdown.

Names may be hostile. They are written as code, where Markdown has no markup, and with entities if they could end the
code. In sentences, entities replace all markup, mentions and links: readers do not agree about backslashes in tables.
"""

import os
import re
from collections.abc import Iterable, Iterator

from quanterr.errors import UsageError
from quanterr.outputs import BEGIN, END
from quanterr.outputs.formatting import sentence
from quanterr.util.text import MAX_SHOWN, display

_SPLIT = "\u200b"  # zero-width space: breaks mentions, issue numbers and links
_LINK = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=[@#])", re.IGNORECASE)
_TEXT = re.compile(r"[A-Za-z0-9 .,:;()'\"/+=%?-]|(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])|<(?=[= \d])|(?<=[- ])>(?=[= \d])")


def format_code(name: str, limit: int = MAX_SHOWN) -> str:
    """Return a name as code; with entities if it could end the code or a table cell."""
    shown = display(name, limit)
    if not set(shown) & set("`|\\") and shown == shown.strip():
        return f"`{shown}`"
    return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in shown)}</code>"


def format_prose(text: str) -> str:
    """Return a sentence with all markup escaped; no character beyond ASCII is markup."""
    shown = _LINK.sub(_SPLIT, sentence(text).strip())
    return "".join(
        c if _TEXT.match(shown, n) or (not c.isascii() and c.isprintable()) or c.isalpha() else f"&#{ord(c)};"
        for n, c in enumerate(shown)
    )


def format_table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of a table whose cells are Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def shorten_path(path: str) -> str:
    """Return a path that may be published: the file name alone if it is absolute or begins with ``~`` or a dot."""
    return os.path.basename(path.rstrip("/")) if os.path.isabs(path) or path.startswith(("~", "../", "./")) else path


def replace_section(text: str, section: str, where: str, append: bool = False) -> str:
    """Return a document in which a section replaces the section with the same heading, or two comments without text.

    If a document has only sections with other headings, the new section follows them. ``append`` adds it at the end of
    a document that has no comments.

    Raises:
        UsageError: there are no comments, or they are not pairs, each comment on its own line.
    """
    lines = text.splitlines(keepends=True)
    marks = [(n, mark) for n, line in enumerate(lines) if (mark := line.strip("\ufeff \t\r\n")) in (BEGIN, END)]
    newline = "\r\n" if "\r\n" in text else "\n"
    made = section.replace("\n", newline)
    if not marks and append:  # after a blank line
        ends = "" if not text or text.endswith("\n") else newline
        return f"{text}{ends}{newline if text else ''}{made}"
    if not marks:
        raise UsageError(
            f"{where}: no comments mark the place of the report; use --append to add it at the end, or add two lines: "
            f"{BEGIN} and {END}"
        )
    if [mark for _, mark in marks] != [BEGIN, END] * (len(marks) // 2):
        description = ", ".join(f"line {n + 1}: {mark}" for n, mark in marks)
        raise UsageError(f"{where}: needs {BEGIN} and {END} in pairs, each on its own line; it has {description}")
    places = [(marks[n][0], marks[n + 1][0]) for n in range(0, len(marks), 2)]
    headings = [_find_heading(lines[first + 1 : last]) for first, last in places]
    new_heading = _find_heading(section.splitlines())
    place = next((n for wanted in (new_heading, "") for n, heading in enumerate(headings) if heading == wanted), None)
    if place is None:  # all sections have other headings
        last = places[-1][1]
        ends = "" if lines[last].endswith("\n") else newline
        return "".join(lines[: last + 1]) + f"{ends}{newline}{made}" + "".join(lines[last + 1 :])
    first, last = places[place]
    before = "".join(lines[:first]) + ("\ufeff" if lines[first].startswith("\ufeff") else "")
    return before + (made if lines[last].endswith("\n") else made.removesuffix(newline)) + "".join(lines[last + 1 :])


def _find_heading(lines: Iterable[str]) -> str:
    """Return the first heading, by which a section is recognized; empty if there is none."""
    return next((line.strip() for line in lines if line.startswith("#")), "")
