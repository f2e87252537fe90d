"""Checksum of stored documents: a CRC-32 of all bytes before it; only ``run`` follows."""

import sys
from collections.abc import Iterator
from functools import cache
from io import SEEK_END, BufferedReader, RawIOBase
from typing import IO, Any
from zlib import crc32

from quanterr.util import strict_json

SEPARATOR = b",\n"
KEY = SEPARATOR + b'"checksum": "'
EDITED = "its checksum does not match: it was edited"
UNCHECKED = "has no checksum: an earlier version wrote it, or it was edited"
LONGEST = 1 << 20  # bytes from the checksum on; a document with a longer ``run`` is not read by line
BLOCK = 1 << 18  # bytes read at once
SCHEMA = {"type": "string", "description": "CRC-32 of all bytes before this field; reveals that the file was edited"}


def is_unedited(raw: bytes) -> bool:
    """Return True if the checksum matches all bytes before it and only ``run`` follows."""
    at = raw.rfind(KEY)
    return at >= 0 and _matches(raw[at + len(SEPARATOR) :], crc32(memoryview(raw)[:at]))


def check_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stored document before its checksum, and at last all others, so that memory holds only one.

    Raises:
        ValueError: instead of the last, if :func:`is_unedited` would be False, or more than LONGEST bytes follow.
    """
    start = max(0, file.seek(0, SEEK_END) - LONGEST)
    file.seek(start)
    end = file.read()
    length = end.rfind(KEY)
    body = _Beginning(file, start + length if length >= 0 else 0)
    yield from BufferedReader(body, BLOCK)
    if length < 0 or not _matches(end[length + len(SEPARATOR) :], body.crc):
        raise ValueError(EDITED)
    yield end[length:]


class _Beginning(RawIOBase):
    """The first bytes of a file, with the CRC-32 of those read so far."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        file.seek(0)
        self.crc = 0
        self._file: Any = file
        self._left = length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read: int = self._file.readinto(memoryview(buffer)[: self._left])
        self.crc = crc32(memoryview(buffer)[:read], self.crc)
        self._left -= read
        return read


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
