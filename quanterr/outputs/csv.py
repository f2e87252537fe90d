"""Documents as CSV: one line for the document, then one per item; column ``list`` names the item's list in the JSON.

All documents of the same type have the same columns. Numbers have full precision; undefined numbers are nan, inf or
-inf, and cells that do not apply are empty. Text that a spreadsheet takes for a formula gets an apostrophe before it
(CWE-1236).
"""

import csv
import re
from functools import lru_cache
from typing import IO

from quanterr.documents.document import Result
from quanterr.util.text import display

VERDICT = "quanterr_verdict"  # a column of results with a verdict
MAX_NAME = 4096  # characters
NUMBER_TYPES = frozenset((float, int, type(None)))  # types that are written unchanged

# A formula character at the start, or after ";" (a possible end of a cell); spreadsheets may drop quotes and spaces
# before it.
_FORMULA = re.compile(r"(^|;)(?=[\s\"']*[=+\-@＝＋－＠])")
_ITS_CHARACTER = re.compile(r"[=+\-@＝＋－＠]")


def write(document: Result, file: IO[str]) -> None:
    """Write the document; every line has the verdict, so that an excerpt has it, too."""
    empty: dict[str, object] = dict.fromkeys(document.listing.CSV_COLUMNS, "")
    if VERDICT in empty:
        empty[VERDICT] = getattr(document, "verdict", "")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(empty)
    for row in document.rows():
        cells = empty | row  # in the order of the columns
        if len(cells) > len(empty):
            raise KeyError(*row.keys() - empty.keys())
        writer.writerow([value if value.__class__ in NUMBER_TYPES else format_cell(value) for value in cells.values()])


def format_cell(value: object) -> object:
    """Return the value as it appears in a cell; lists are joined, booleans in lower case, formulas made harmless."""
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return _format_text((" " if value and isinstance(value[0], str) else "x").join(map(str, value)))
    return value


@lru_cache(maxsize=1 << 12)  # cached, as layers have most of their texts in common
def _format_text(value: str) -> str:
    if not value:
        return value
    text = display(value, MAX_NAME)
    return _FORMULA.sub(r"\1'", text) if _ITS_CHARACTER.search(text) else text  # this search is several times faster
