"""Text for users: escaping of untrusted names, and formatting of sizes, counts and numbers."""

import re
from collections.abc import Sequence
from itertools import takewhile
from os.path import exists

MAX_SHOWN = 200
MAX_LINE = 20_000
LINE_COMMAND = "::"  # starts a GitHub Actions command at the beginning of a line
COMMAND = re.compile(r"##(?=\w*\[)")  # a command of GitHub's runner, Azure Pipelines or TeamCity, anywhere in a line


def display(name: str, limit: int = MAX_SHOWN) -> str:
    """Return a name from a checkpoint, escaped so that it can be printed anywhere.

    Unprintable characters (control characters, escape sequences, bidirectional overrides, line separators, lone
    surrogates) become ``\\xNN``, ``\\uNNNN`` or ``\\UNNNNNNNN``, and so does the first character of a CI runner's
    command. The middle of a name longer than ``limit`` characters is left out.
    """
    if 0 < len(name) <= limit and "::" not in name and "##" not in name and name.isprintable():
        return name  # the usual case
    if len(name) > 2 * limit:  # the part that is left out need not be escaped
        name = name[:limit] + name[-limit:]
    shown = name if name.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in name)
    if shown.lstrip().startswith(LINE_COMMAND):
        start = len(shown) - len(shown.lstrip())
        shown = shown[:start] + _escape(shown[start]) + shown[start + 1 :]
    shown = escape_commands(shown)
    if not shown:
        return '""'
    if len(shown) > limit:
        half = (limit - 1) // 2
        shown = f"{shown[:half]}…{shown[-half:]}"
    return shown


def quote(text: str) -> str:
    """Return text in quotation marks, which make spaces at its ends visible."""
    return f'"{text}"'


def escape_commands(line: str) -> str:
    """Escape the commands of CI runners inside a line, but not ``::`` at its beginning."""
    return COMMAND.sub(r"\\x23#", line) if "##" in line else line


def escape_text(text: str) -> str:
    """Escape text of several lines, such as a traceback, for printing."""
    return "\n".join(line and display(line, MAX_LINE) for line in text.splitlines())


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def parse_digits(word: str) -> int | None:
    """Return the value of one to nine ASCII digits; None for any other text (Python also counts ``²`` as a digit)."""
    return int(word) if 0 < len(word) < 10 and word.isascii() and word.isdecimal() else None


def escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates (undecodable bytes of file names or arguments) written as ``\\udcNN``."""
    return text.encode("utf-8", "backslashreplace").decode()


def itemize(names: Sequence[str], limit: int = 5) -> str:
    """Return up to ``limit`` names, escaped and joined by commas, and how many more there are."""
    shown = ", ".join(display(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def cut_prefix(names: Sequence[str]) -> tuple[list[str], str]:
    """Return names without the words with which all begin, and these words; no name becomes empty."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    same = "".join(letters[0] for letters in alike) if len(names) > 1 else ""
    while same and (same[-1] not in "-./ " or same in names):
        same = same[:-1]
    return [name.removeprefix(same) for name in names], same


def size(n_bytes: float) -> str:
    """Format a number of bytes in binary units: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} TiB"


def count(n: int, singular: str, plural: str | None = None) -> str:
    """Format a count with its noun: ``1 tensor``, ``1,204 tensors``."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def with_article(noun: str) -> str:
    """Return a noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiouAEIO' else 'a'} {noun}"


def format_decisive(value: float, limit: float | None = None) -> str:
    """Format a number with five digits, ``31.545``, or with so many that it stays on the same side of ``limit``."""
    for digits in range(5, 18):
        shown = float(f"{value:.{digits}g}")
        if limit is None or (shown > limit, shown < limit) == (value > limit, value < limit):
            break
    return format_exact(shown)


def format_exact(value: float) -> str:
    """Format a number exactly: ``30``, ``29.999999999999996``."""
    return repr(float(value)).removesuffix(".0")


def named_path(given: str) -> tuple[str, str]:
    """Split ``prose=a.txt`` into name and path; the name is empty without ``=``, or if a file has the whole name."""
    name, sign, path = given.partition("=")
    return (name, path) if name and sign and not exists(given) else ("", given)
