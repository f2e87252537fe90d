"""Checksum of stored documents: a CRC-32 of all bytes before it; only ``run`` follows."""

import sys
from collections.abc import Iterator
from functools import cache
from typing import IO
from zlib import crc32

from quanterr.util import strict_json

SEPARATOR = b",\n"
KEY = SEPARATOR + b'"checksum": "'
EDITED = "its checksum does not match: it was edited"
UNCHECKED = "has no checksum: an earlier version wrote it, or it was edited"
SCHEMA = {"type": "string", "description": "CRC-32 of all bytes before this field; reveals that the file was edited"}


def is_unedited(raw: bytes) -> bool:
    """Return True if the checksum matches all bytes before it and only ``run`` follows."""
    at = raw.rfind(KEY)
    return at >= 0 and _matches(raw[at + len(SEPARATOR) :], crc32(memoryview(raw)[:at]))


def check_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stored document before its checksum, and at last all others, so that memory holds only one.

    Raises:
        ValueError: instead of the last, if :func:`is_unedited` would be False.
    """
    crc, held = 0, b""
    for line in file:
        if line.startswith(KEY.removeprefix(SEPARATOR)):
            end = line + file.read()
            if held.endswith(SEPARATOR) and _matches(end, crc32(held[: -len(SEPARATOR)], crc)):
                yield end
                return
            break
        crc, held = crc32(held, crc), line
        yield line
    raise ValueError(EDITED)


def _matches(tail: bytes, crc: int) -> bool:
    """Return whether the end of a document holds this checksum, and nothing else but ``run``."""
    try:
        found = strict_json.loads(b"{" + tail)
    except strict_json.InvalidJson:
        return False
    return bool(found.keys() == {"checksum", "run"} and found["checksum"] == f"{crc:08x}")


@cache  # warn once about a file that is read twice
def warn(where: str, why: str = EDITED) -> None:
    """Warn on stderr that a file was edited, or that it may have been."""
    print(f"quanterr: warning: {where}: {why}", file=sys.stderr)
