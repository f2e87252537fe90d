"""Whether a stored file is still as it was written: a CRC-32 of all before it, which only ``run`` follows."""

import sys
from functools import cache
from zlib import crc32

from quanterr.util import strict_json

KEY = b',\n"checksum": "'
SCHEMA = {"type": "string", "description": "CRC-32 of everything before it: reveals a file that was edited"}


def is_as_written(raw: bytes) -> bool:
    """Whether every byte up to the checksum is as it was written, and nothing but ``run`` follows."""
    at = raw.rfind(KEY)
    if at < 0:
        return False
    try:
        tail = strict_json.loads(b"{" + raw[at + 1 :])
    except strict_json.InvalidJson:
        return False
    return bool(tail.keys() == {"checksum", "run"} and tail["checksum"] == f"{crc32(memoryview(raw)[:at]):08x}")


@cache  # a file that is read twice is reported once
def tell_changed(where: str) -> None:
    """Say on standard error that a file was edited."""
    print(f"quanterr: warning: {where}: its checksum does not match: it was edited", file=sys.stderr)


@cache
def tell_unchecked(where: str) -> None:
    """Say on standard error that nothing shows whether a file was edited."""
    print(
        f"quanterr: warning: {where}: has no checksum: an earlier version wrote it, or it was edited", file=sys.stderr
    )
