"""Atomic replacement of files, so that readers see either the old file or the complete new one."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PRIVATE = 0o600


@contextmanager
def replace_atomically(path: Path, mode: int = PRIVATE) -> Iterator[IO[bytes]]:
    """Yield a temporary binary file next to ``path`` that replaces it at the end, or is removed after an error.

    ``mode`` is that of the new file as in open(2), reduced by the umask.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    file = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115 - closed below
    try:
        with file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
