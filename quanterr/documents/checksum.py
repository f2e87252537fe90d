"""The checksum of stored documents: a CRC-32 of all bytes before it; only ``run`` comes after it."""

import sys
from collections.abc import Iterator
from functools import cache
from os import SEEK_END
from typing import IO
from zlib import crc32

from quanterr.util import strict_json

READ_BYTES = 1 << 16  # bytes per read: buffers of 128 KiB or more would be mapped and cleared on every read
TAIL_BYTES = 1 << 16  # bytes at the end of a document that hold its checksum and ``run``
SEPARATOR = b",\n"
KEY = SEPARATOR + b'"checksum": "'
EDITED = "its checksum does not match: it was edited"
UNCHECKED = "has no checksum: an earlier version wrote it, or it was edited"
SCHEMA = {"type": "string", "description": "CRC-32 of all bytes before this field; reveals that the file was edited"}


def is_unedited(raw: bytes) -> bool:
    """Return True if the checksum matches all bytes before it and only ``run`` follows."""
    at = raw.rfind(KEY)
    return at >= 0 and _matches(raw[at + len(SEPARATOR) :], crc32(memoryview(raw)[:at]))


def check_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a stored document in blocks of whole lines, one at a time; the last begins at the checksum.

    Raises:
        ValueError: in place of the last block, if :func:`is_unedited` would return False, or if the recorded command is
            very long.
    """
    size = file.seek(0, SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read()
    at, crc = tail.rfind(KEY), 0
    left = size - len(tail) + at if at >= 0 else 0
    file.seek(0)
    while block := file.read(min(READ_BYTES, left)):
        block += file.readline(left - len(block))
        left, crc = left - len(block), crc32(block, crc)
        yield block
    if at < 0 or not _matches(tail[at + len(SEPARATOR) :], crc):
        raise ValueError(EDITED)
    yield tail[at:]


def _matches(tail: bytes, crc: int) -> bool:
    """Return whether the end of a document holds this checksum and ``run``, and nothing else."""
    try:
        fields = strict_json.loads(b"{" + tail)
    except strict_json.InvalidJson:
        return False
    return bool(fields.keys() == {"checksum", "run"} and fields["checksum"] == f"{crc:08x}")


@cache  # warn once about a file that is read twice
def warn(where: str, why: str = EDITED) -> None:
    """Warn on stderr that a file was edited, or that it may have been."""
    print(f"quanterr: warning: {where}: {why}", file=sys.stderr)
