"""Text for people: names made harmless, sizes and counts made short."""

import re
from os.path import exists

MAX_SHOWN = 200
MAX_LINE = 20_000
LINE_COMMAND = "::"  # of GitHub Actions, at the beginning of a line
COMMAND = re.compile(r"##(?=\w*\[)")  # of GitHub's runner, Azure Pipelines and TeamCity, wherever it stands


def display(name: str, limit: int = MAX_SHOWN) -> str:
    """A name from a checkpoint as it may be printed anywhere.

    Whatever is not printable (control characters, escape sequences, bidirectional overrides, line
    separators, lone surrogates) becomes ``\\xNN``, ``\\uNNNN`` or ``\\UNNNNNNNN``, and so does the first
    character of what a CI runner would obey; a long name loses its middle.
    """
    if len(name) > 2 * limit:  # what is left out need not be looked at
        name = name[:limit] + name[-limit:]
    shown = name if name.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in name)
    if shown.lstrip().startswith(LINE_COMMAND):
        start = len(shown) - len(shown.lstrip())
        shown = shown[:start] + _escaped(shown[start]) + shown[start + 1 :]
    shown = no_command(shown)
    if not shown:
        return '""'
    if len(shown) > limit:
        half = (limit - 1) // 2
        shown = f"{shown[:half]}…{shown[-half:]}"
    return shown


def no_command(line: str) -> str:
    """A line in which no CI runner finds a command, where the line does not begin with one."""
    return COMMAND.sub(r"\\x23#", line) if "##" in line else line


def harmless(text: str) -> str:
    """Text of several lines, such as a traceback, as it may be printed."""
    return "\n".join(line and display(line, MAX_LINE) for line in text.splitlines())


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def whole(word: str) -> int | None:
    """The number that up to nine ASCII digits are; None of anything else, as ``²``, which is a digit to Python."""
    return int(word) if 0 < len(word) < 10 and word.isascii() and word.isdecimal() else None


def unicode(text: str) -> str:
    """The same; bytes of a file name or an argument that are no Unicode become ``\\udcNN``, for JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


def listed(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(display(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def size(n_bytes: float) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} TiB"


def count(n: int, one: str, many: str | None = None) -> str:
    """``1 tensor``, ``1,204 tensors``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def decisive(value: float, limit: float | None = None) -> str:
    """A number with five digits: ``31.545``; with more where these would put it on the other side of ``limit``."""
    for digits in range(5, 18):
        shown = float(f"{value:.{digits}g}")
        if limit is None or (shown > limit, shown < limit) == (value > limit, value < limit):
            break
    return unrounded(shown)


def unrounded(value: float) -> str:
    """A number with all its digits: ``30``, ``29.999999999999996``."""
    return repr(float(value)).removesuffix(".0")


def named_path(given: str) -> tuple[str, str]:
    """Return name and path of ``prose=a.txt``; no name where there is no sign, or a file of the whole name."""
    name, sign, path = given.partition("=")
    return (name, path) if name and sign and not exists(given) else ("", given)
