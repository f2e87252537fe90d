"""Names and sentences as plain text in Markdown; needs no pydantic.

Names may be hostile. They are written as code, where Markdown has no markup, and with entities if they could end the
code. In sentences, entities replace all markup, mentions and links.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from quanterr.report.formatting import format_doubts, sentence
from quanterr.util.text import MAX_SHOWN, display

_SPLIT = "\u200b"  # zero-width space: breaks mentions, issue numbers and links
_LINK = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=[@#])", re.IGNORECASE)
_TEXT = re.compile(r"[A-Za-z0-9 .,:;()'\"/+=%?-]|(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])")


def format_code(name: str, limit: int = MAX_SHOWN) -> str:
    """Return a name as code; with entities if it could end the code or a table cell."""
    shown = display(name, limit)
    if not set(shown) & set("`|\\") and shown == shown.strip():
        return f"`{shown}`"
    return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in shown)}</code>"


def format_prose(text: str) -> str:
    """Return a sentence with all markup escaped."""
    shown = _LINK.sub(_SPLIT, sentence(text).strip())
    return "".join(c if _TEXT.match(shown, n) or c.isalpha() else f"&#{ord(c)};" for n, c in enumerate(shown))


def table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of a table whose cells are Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def shorten_path(path: str) -> str:
    """Return a path fit for publishing: unchanged for a hub or store, the bare name for a local absolute path."""
    return path if "://" in path or not os.path.isabs(path) else os.path.basename(path.rstrip("/"))


def format_verdict(verdict: str, done: str, doubts: Sequence[str]) -> str:
    """Return "Verdict: fail", or "Compared, no limits set" for an empty verdict, with doubts."""
    words = f"Verdict: {verdict}" if verdict else f"{done.capitalize()}, no limits set"
    return f"{words}{format_prose(format_doubts(doubts))}" if doubts else words
