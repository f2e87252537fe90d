"""Colours of plain lines in a terminal, for commands that do not wait for rich."""

import os
from typing import IO

CODES = {"pass": "32", "fail": "1;31", "warning": "33", "strong": "1", "faint": "2"}


def wanted(file: IO[str], color: str = "auto") -> bool:
    """Whether a stream gets colours. ``color`` is auto, always or never.

    auto: where there is a terminal; NO_COLOR, TERM=dumb, FORCE_COLOR and CLICOLOR_FORCE (0 is off) decide before.
    """
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    for variable in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        if value := os.environ.get(variable):
            return value != "0"
    return file.isatty()


def painted(text: str, tone: str | None, on: bool = True) -> str:
    """A text in a tone of :data:`CODES`."""
    return f"\x1b[{CODES[tone]}m{text}\x1b[0m" if on and tone else text
