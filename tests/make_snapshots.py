"""Writes what the outputs make of a small report, for people to look at before they accept a change.

python tests/make_snapshots.py        tests/test_outputs.py holds the outputs against tests/snapshots
"""

import io
import re
from collections.abc import Callable
from pathlib import Path

from sample_reports import report_of, tiny

from quanterr.report import OUTPUTS
from quanterr.report.as_table import console, show

FOLDER = Path(__file__).parent / "snapshots"
WIDTH = 100


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """Whether it is one."""
        return True


def rendered(name: str) -> str:
    """One of the outputs."""
    file = io.StringIO()
    next(output for output in OUTPUTS if output.name == name).write(report_of(tiny()), file)
    return file.getvalue()


def page() -> str:
    """The page without style, script and data, which are tested elsewhere."""
    text = re.sub(r"<(style|script)([^>]*)>.*?</\1>", r"<\1\2>…</\1>", rendered("html"), flags=re.DOTALL)
    return re.sub(r"sha256-[^']+", "sha256-…", text)


def terminal() -> str:
    """The tables and maps of a terminal, without colours."""
    file = Terminal()
    to = console(file, "never")
    to.width = WIDTH
    show(report_of(tiny()), to)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


SNAPSHOTS: dict[str, Callable[[], str]] = {
    "tiny.jsonl": lambda: rendered("jsonl"),
    "tiny.csv": lambda: rendered("csv"),
    "tiny.md": lambda: rendered("md"),
    "tiny.xml": lambda: rendered("junit"),
    "tiny.html": page,
    "terminal.txt": terminal,
}


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in SNAPSHOTS.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
