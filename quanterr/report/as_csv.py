"""Documents as CSV: a line for the whole, then one for each item; ``list`` says which list of the JSON.

All documents of a kind have the same columns. A number is written in full; one that is undefined as nan, inf or -inf,
one that does not apply as nothing. A text that a spreadsheet would take for a formula gets an apostrophe before it
(CWE-1236).
"""

import csv
import re
from functools import lru_cache
from typing import IO

from quanterr.report.sections import Shown
from quanterr.util.text import display

MAX_NAME = 4096  # characters
NUMBERS = frozenset((float, int, type(None)))  # which are written as they are

# At the start, or after what a spreadsheet may take for the end of a cell; quotes and spaces it may take away.
_FORMULA = re.compile(r"(^|;)(?=[\s\"']*[=+\-@＝＋－＠])")


def write(document: Shown, file: IO[str]) -> None:
    """Write it; the verdict is in every line, so that no extract of them loses it."""
    names, rows = list(document.columns()), csv.writer(file, lineterminator="\n")
    places = {name: place for place, name in enumerate(names)}
    rows.writerow(names)
    for row in document.rows():
        cells: list[object] = [""] * len(names)
        for name, value in row:
            cells[places[name]] = value if value.__class__ in NUMBERS else cell(value)
        rows.writerow(cells)


def cell(value: object) -> object:
    """What stands in a cell."""
    if isinstance(value, list | tuple):
        value = (" " if value and isinstance(value[0], str) else "x").join(map(str, value))
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else value
    return _text(value) if value else value


@lru_cache(maxsize=1 << 12)  # most texts are those of many layers
def _text(value: str) -> str:
    return _FORMULA.sub(r"\1'", display(value, MAX_NAME))
