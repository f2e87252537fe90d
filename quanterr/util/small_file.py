"""Small files that are read whole: regular files of a limited size, whatever a name turns out to be."""

import os
import stat
from pathlib import Path

from quanterr.util.platform import opened


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of a regular file; a FIFO or a device is refused at once, never waited for or read without end.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is not a regular file, or has more than ``limit`` bytes.
    """
    descriptor = opened(path)
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
