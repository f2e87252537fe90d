"""Data of layers in columns, as the scripts of a page read them, with numbers rounded to the digits shown."""

import re
from collections.abc import Iterable, Mapping, Sequence

from quanterr.outputs.sections import Row
from quanterr.selection.roles import place_of
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

DIGITS = ".4g"  # significant digits of a number in a column
MORE_DIGITS = ".5g"  # significant digits in the details
SHARE_DIGITS = ".3g"
DB_PLACES = 2
MAX_DETAILED = 3000  # maximum number of layers with details

SAME = "="  # in place of a number: the layer equals the original

# Statuses of a layer, as numbers for the scripts.
DIFFERS, CHANGED, IDENTICAL, NOT_COMPARED = range(4)


_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")


def make_columns(rows: Iterable[Row]) -> JsonObject:
    """Return rows as columns."""
    all_rows = list(rows)
    first = all_rows[0] if all_rows else Row("", DIFFERS, {}, {})
    return pack_columns(
        [row.name for row in all_rows],
        [row.status for row in all_rows],
        {key: [row.words[key] for row in all_rows] for key in first.words},
        {key: [row.numbers[key] for row in all_rows] for key in first.numbers},
    )


def pack_columns(
    names: Sequence[str], statuses: Sequence[int], words: Mapping[str, Iterable[str | None]], numbers: JsonObject
) -> JsonObject:
    """Return columns for the scripts; each name is stored as a pattern and the numbers in it."""
    split = [_NUMBER.split(display(name)) for name in names]  # text and numbers, alternating
    places = [place_of(name) for name in names]
    patterns, distinct = _number_words("\0".join(name[::2]) for name in split)
    shared = {
        "stack": _number_words(place and display(place.stack) for place in places),
        "module": _number_words(place and display(place.module) for place in places),
        **{key: _number_words(column) for key, column in words.items()},
    }
    return {
        "columns": {
            "status": statuses,
            "pattern": patterns,
            "block": [place.block if place else -1 for place in places],
            **{key: column for key, (column, _) in shared.items()},
            **numbers,
        },
        "words": {key: known for key, (_, known) in shared.items()},
        "patterns": distinct,
        "numbers": [int(number) for name in split for number in name[1::2]],
    }


def _number_words(words: Iterable[str | None]) -> tuple[list[int], list[str]]:
    """Number the distinct words; return the number of each word, -1 for None, and the list of distinct words."""
    known: dict[str, int] = {}
    return [-1 if word is None else known.setdefault(word, len(known)) for word in words], list(known)


def round_digits(value: float | None, digits: str) -> float | None:
    """Round to the significant digits that a format such as ".4g" shows."""
    return None if value is None else float(format(value, digits))
