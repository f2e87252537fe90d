"""The definition of a defect: an exception other than quanterr's own, or a message unfit to be shown."""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from quanterr.errors import QuanterrError

MAX_MESSAGE = 20_000  # characters


class Target(NamedTuple):
    """A reader to fuzz: ``make`` returns an input; ``check`` reads it, returns the outcome and raises on a defect."""

    name: str
    make: Callable[[Random], bytes]
    check: Callable[[bytes], str]


class Defect(AssertionError):
    """A promise that quanterr broke."""


@cache
def _folder_of(process: int) -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="quanterr-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def folder() -> Path:
    """Return a folder of this process, in memory where possible."""
    return Path(_folder_of(os.getpid()).name)


def refusal(error: QuanterrError) -> str:
    """Return where an input was refused, as ``file:line``. A message that is not one printable line is a defect."""
    message = str(error)
    if not message or not message.isprintable() or len(message) > MAX_MESSAGE:
        raise Defect(f"not fit to be shown: {message[:MAX_MESSAGE]!a}") from error
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code if place else None
    return f"{type(error).__name__} {Path(code.co_filename).name}:{place.tb_lineno}" if code else "?"


def require(holds: object, what: str) -> None:
    """Raise a Defect unless the promise holds."""
    if not holds:
        raise Defect(what)
