"""Names and sentences in Markdown, as plain text that a stored report is judged without the model for.

Names are hostile. They stand in code, where Markdown knows no markup, and those that could end it are written
in entities; of sentences everything that is markup, a mention or a link is written in entities.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from quanterr.report.formatting import but, sentence
from quanterr.util.text import MAX_SHOWN, display

_SPLIT = "\u200b"  # of no width: splits what would be a mention, an issue or a link
_LINK = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=[@#])", re.IGNORECASE)
_TEXT = re.compile(r"[A-Za-z0-9 .,:;()'\"/+=%?-]|(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])")


def code(name: str, limit: int = MAX_SHOWN) -> str:
    """A name as code; one that could end the code or the cell of a table in entities, which Markdown leaves alone."""
    shown = display(name, limit)
    if not set(shown) & set("`|\\") and shown == shown.strip():
        return f"`{shown}`"
    return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in shown)}</code>"


def prose(text: str) -> str:
    """A sentence whose characters are all text."""
    shown = _LINK.sub(_SPLIT, sentence(text).strip())
    return "".join(c if _TEXT.match(shown, n) or c.isalpha() else f"&#{ord(c)};" for n, c in enumerate(shown))


def table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Lines of a table; its cells are Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def located(path: str) -> str:
    """A path as others may see it: what is on a hub or in a store, or the name of a local file."""
    return path if "://" in path or not os.path.isabs(path) else os.path.basename(path.rstrip("/"))


def of_verdict(verdict: str, done: str, doubts: Sequence[str]) -> str:
    """``Verdict: fail``, or ``Compared, no limits set`` where there is none; with what questions it."""
    words = f"Verdict: {verdict}" if verdict else f"{done.capitalize()}, no limits set"
    return f"{words}{prose(but(doubts))}" if doubts else words
