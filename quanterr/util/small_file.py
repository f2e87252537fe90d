"""Safe reading of small files, which must be regular files of limited size."""

import os
import stat
from pathlib import Path

from quanterr.util.platform import open_for_reading


def read_small(path: Path, limit: int) -> bytes:
    """Read a whole regular file; a FIFO or a device, from which reading could block or never end, is refused.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: the path is not a regular file, or the file has more than ``limit`` bytes.
    """
    descriptor = open_for_reading(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{status.st_size} bytes; the limit is {limit}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)
