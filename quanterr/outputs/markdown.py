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


def table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of a table whose cells are Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def shorten_path(path: str) -> str:
    """Return a path fit for publishing: the bare name for a path from the root, from ``~`` or upwards."""
    return os.path.basename(path.rstrip("/")) if os.path.isabs(path) or path.startswith(("~", "../", "./")) else path


def replace_section(text: str, section: str, where: str, append: bool = False) -> str:
    """Return a document whose section between the comments is replaced.

    ``append`` adds the section at the end if the document has no comments.

    Raises:
        UsageError: the comments are not exactly one pair, each on its own line.
    """
    lines = text.splitlines(keepends=True)
    found = [(n, mark) for n, line in enumerate(lines) if (mark := line.strip("\ufeff \t\r\n")) in (BEGIN, END)]
    if not found and append:  # after a blank line, with the line ends of the text
        newline = "\r\n" if "\r\n" in text else "\n"
        ends = "" if not text or text.endswith("\n") else newline
        return f"{text}{ends}{newline if text else ''}{section.replace(chr(10), newline)}"
    if not found:
        raise UsageError(
            f"{where}: no comments mark the place of the report; use --append to add it at the end, or add two lines: "
            f"{BEGIN} and {END}"
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
