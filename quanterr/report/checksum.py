"""Checksum of stored documents: a CRC-32 of all bytes before it; only ``run`` follows."""

import sys
from functools import cache
from zlib import crc32

from quanterr.util import strict_json

KEY = b',\n"checksum": "'
EDITED = "its checksum does not match: it was edited"
UNCHECKED = "has no checksum: an earlier version wrote it, or it was edited"
SCHEMA = {"type": "string", "description": "CRC-32 of all bytes before this field; reveals that the file was edited"}


def is_unedited(raw: bytes) -> bool:
    """Return True if the checksum matches all bytes before it and only ``run`` follows."""
    at = raw.rfind(KEY)
    if at < 0:
        return False
    try:
        tail = strict_json.loads(b"{" + raw[at + 1 :])
    except strict_json.InvalidJson:
        return False
    return bool(tail.keys() == {"checksum", "run"} and tail["checksum"] == f"{crc32(memoryview(raw)[:at]):08x}")


@cache  # warn once about a file that is read twice
def warn(where: str, why: str = EDITED) -> None:
    """Warn on stderr that a file was edited, or that it may have been."""
    print(f"quanterr: warning: {where}: {why}", file=sys.stderr)
