"""Strict parsing of untrusted JSON, which refuses duplicate keys, huge numbers and NaN."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

JsonObject = dict[str, Any]  # what json.loads returns for an object
JsonFields = Mapping[str, Any]  # a read-only JSON object

MAX_DIGITS = 20  # digits of an integer: 2^64 has 20


class InvalidJson(ValueError):
    """Text that is not valid strict JSON; the message gives the reason."""


class DuplicateKey(InvalidJson):
    """An object that has the same ``key`` twice."""

    def __init__(self, key: str) -> None:
        """Keep the key, and name it in the message."""
        super().__init__(f'holds the duplicate key "{key}"')
        self.key = key


def loads_text(text: str) -> Any:
    """Parse JSON in a text that another file holds, as :func:`loads` does.

    Raises:
        InvalidJson: for the reasons that :func:`loads` states; a lone surrogate is not UTF-8.
    """
    return loads(text.encode("utf-8", "surrogatepass"))


def loads(raw: bytes, lenient: bool = False) -> Any:
    """Parse UTF-8 JSON.

    ``lenient`` accepts duplicate keys (the last one wins) and NaN, for files that are only hints.

    Raises:
        InvalidJson: not UTF-8, not JSON or nested too deeply; unless lenient, a duplicate key, NaN or a huge integer.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"is not valid UTF-8 JSON at byte {error.start}") from error
    try:
        if lenient:
            return json.loads(text)
        return json.loads(
            text, object_pairs_hook=_refuse_duplicate_keys, parse_int=_parse_integer, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        raise InvalidJson(f"is not valid UTF-8 JSON at byte {at} ({error.msg})") from error
    except RecursionError as error:
        raise InvalidJson("is nested too deep") from error


def dumps(value: object, indent: int | None = None) -> str:
    """Return ASCII JSON without NaN that CI runners do not mistake for commands."""
    text = json.dumps(value, allow_nan=False, indent=indent)
    return text.replace("##", r"#\u0023")  # otherwise a CI runner could take it for a command (text.COMMAND)


def as_object(value: object) -> JsonObject:
    """Return ``value`` if it is a JSON object, otherwise an empty object."""
    return value if isinstance(value, dict) else {}


def _refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(key)
            seen.add(key)
    return fields


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidJson(f"holds a number of {len(digits)} digits; offsets and sizes are integers in 0…2^63")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f"holds {name}; {name} is not JSON")
