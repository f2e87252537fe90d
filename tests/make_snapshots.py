"""Write the outputs of small documents as snapshots, to review before a change is accepted.

python tests/make_snapshots.py        tests/outputs/test_outputs.py compares the outputs with tests/snapshots
"""

import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from support import sample_documents
from support.sample_reports import report_of, tiny

from quanterr.outputs import DIFF_OUTPUTS, OUTPUTS
from quanterr.outputs.terminal import make_console
from quanterr.outputs.terminal import show as print_view

FOLDER = Path(__file__).parent / "snapshots"
WIDTH = 100
NARROW, WIDE = 80, 140


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """Return True."""
        return True


def render(document: Callable[[], object], outputs: tuple, name: str) -> str:
    """Return one output of a document; for a page, the text visible without scripts."""
    file = io.StringIO()
    next(output for output in outputs if output.name == name).write(document(), file)
    return text_of(file.getvalue()) if name == "html" else file.getvalue()


def text_of(page: str) -> str:
    """Return the texts in a page's body, one element per line."""
    body = re.sub(r"<(style|script)([^>]*)>.*?</\1>", "", page.partition("<body")[2], flags=re.DOTALL)
    body = body.partition(">")[2].replace("<wbr>", "")
    lines = (line.strip() for line in re.sub(r"<[^>]*>", "\n", body).splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def page() -> str:
    """Return the report's page without style, script and data, which have their own tests."""
    file = io.StringIO()
    next(output for output in OUTPUTS if output.name == "html").write(report_of(tiny()), file)
    text = re.sub(r"<(style|script)([^>]*)>.*?</\1>", r"<\1\2>…</\1>", file.getvalue(), flags=re.DOTALL)
    return re.sub(r"sha256-[^']+", "sha256-…", text)


def terminal(print_to: Callable[[Console], None], width: int = WIDTH, color: str = "never") -> str:
    """Return the output of a terminal with the given width."""
    file = Terminal()
    to = make_console(file, color)
    to.width = width
    print_to(to)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def of_document(
    document_kind: str, document: Callable[[], object], outputs: tuple, show: Callable
) -> dict[str, Callable]:
    """Return the snapshots of a document: each output, and terminals with the answer alone and with tables."""

    def of_terminal(width: int, color: str, verbose: bool = True) -> str:
        return terminal(lambda to: show(document(), to, verbose), width, color)

    snapshots: dict[str, Callable[[], str]] = {
        f"{document_kind}{output.suffix}": partial(render, document, outputs, output.name) for output in outputs
    }
    snapshots[f"{document_kind}-answer.txt"] = partial(of_terminal, WIDTH, "never", verbose=False)
    snapshots[f"{document_kind}-narrow.txt"] = partial(of_terminal, NARROW, "always")
    snapshots[f"{document_kind}-wide.txt"] = partial(of_terminal, WIDE, "never")
    return snapshots


def show_view(document: object, to: Console, verbose: bool = True) -> None:
    """Print a document as a terminal shows it."""
    print_view(document.view(10), to, verbose=verbose)


def of_report(name: str) -> Callable[[], str]:
    """Return a function that renders an output of the report."""
    return partial(render, lambda: report_of(tiny()), OUTPUTS, name)


SNAPSHOTS: dict[str, Callable[[], str]] = {
    "tiny.jsonl": of_report("jsonl"),
    "tiny.csv": of_report("csv"),
    "tiny.md": of_report("md"),
    "tiny.xml": of_report("junit"),
    "tiny.html": page,
    "answer.txt": lambda: terminal(lambda to: show_view(report_of(tiny()), to, verbose=False)),
    "terminal.txt": lambda: terminal(lambda to: show_view(report_of(tiny()), to)),
    **of_document("encoder", sample_documents.encoder, OUTPUTS, show_view),
    **of_document("diff", sample_documents.report_diff, DIFF_OUTPUTS, show_view),
}
for kind in sample_documents.KINDS_WITH_SAMPLES:
    SNAPSHOTS |= of_document(kind, getattr(sample_documents, kind), OUTPUTS, show_view)
    SNAPSHOTS |= of_document(f"{kind}_diff", getattr(sample_documents, f"{kind}_diff"), DIFF_OUTPUTS, show_view)


def main() -> None:
    """Write all snapshots."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in SNAPSHOTS.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
