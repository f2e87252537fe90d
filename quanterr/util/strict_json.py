"""JSON from a file that nobody vouches for: no duplicate keys, no huge numbers, no NaN, no surprise."""

import json
from collections.abc import Callable, Mapping
from typing import Any

JsonObject = dict[str, Any]  # as json.loads gives it
JsonFields = Mapping[str, Any]  # the same, which nobody changes

MAX_DIGITS = 20  # of an integer: 2^64 has 20


class Invalid(ValueError):
    """What is wrong with the text."""


class DuplicateKey(Invalid):
    """A key that occurs twice in one object; ``key`` is it."""

    def __init__(self, key: str) -> None:
        """Remember the key."""
        super().__init__(f'holds the duplicate key "{key}"')
        self.key = key


def loads(raw: bytes, lenient: bool = False) -> Any:
    """The value of UTF-8 JSON.

    ``lenient`` accepts duplicate keys (the last one holds) and NaN: for files that are hints only.

    Raises:
        Invalid: not UTF-8, not JSON, nested too deeply, duplicate keys, NaN or a number out of range.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Invalid(f"is not valid UTF-8 JSON at byte {error.start}") from error
    try:
        if lenient:
            return json.loads(text)
        return json.loads(text, object_pairs_hook=_unique_keys, parse_int=_integer, parse_constant=_constant)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        raise Invalid(f"is not valid UTF-8 JSON at byte {at} ({error.msg})") from error
    except RecursionError as error:
        raise Invalid("is nested too deep") from error


def dumps(value: object, default: Callable[[Any], Any] | None = None, indent: int | None = None) -> str:
    """ASCII JSON without NaN, in which no CI runner finds a command when it is printed (see text.COMMAND)."""
    return json.dumps(value, allow_nan=False, default=default, indent=indent).replace("##", r"#\u0023")


def as_object(value: object) -> JsonObject:
    """The value where it is a JSON object, else an empty one: for files that may hold anything."""
    return value if isinstance(value, dict) else {}


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(key)
            seen.add(key)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Invalid(f"holds a number of {len(digits)} digits; offsets and sizes are integers in 0…2^63")
    return int(digits)


def _constant(name: str) -> Any:
    raise Invalid(f"holds {name}; {name} is not JSON")
