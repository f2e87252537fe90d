"""Terminal colours for plain lines, for commands that start too fast to import rich."""

import os
from typing import IO

CODES = {"pass": "32", "fail": "1;31", "warning": "33", "strong": "1", "faint": "2"}


def use_color(file: IO[str], color: str = "auto") -> bool:
    """Return whether to colour output to a stream. ``color`` is ``auto``, ``always`` or ``never``.

    ``auto`` colours terminals only, unless NO_COLOR, TERM=dumb, FORCE_COLOR or CLICOLOR_FORCE (0 means off) is set.
    """
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    for variable in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        if value := os.environ.get(variable):
            return value != "0"
    return file.isatty()


def paint(text: str, tone: str | None, on: bool = True) -> str:
    """Return the text wrapped in the escape codes of a tone from :data:`CODES`, if ``on``."""
    return f"\x1b[{CODES[tone]}m{text}\x1b[0m" if on and tone else text
