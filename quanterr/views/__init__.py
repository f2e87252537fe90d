"""Views, figures and rows of all results, and the functions that write them as outputs.

The modules about a type of result are in the package with the same name as that of its class in documents/, and are
imported on use. view.py has ``view``, and ``brief`` if the line for ``--quiet`` differs from the conclusion. The module
that ``ROWS`` of the class names has ``CSV_COLUMNS``, ``rows`` and ``suites`` (of JUnit tests). plot.py has ``plot`` if
there is a figure.
"""

from importlib import import_module
from os import PathLike, fspath
from types import ModuleType
from typing import TYPE_CHECKING

from quanterr.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from quanterr.documents.document import Document, Result
    from quanterr.outputs.sections import View


def view(result: "Result", top: int) -> "View":
    """Return the sections that a reader sees, with at most ``top`` layers of each kind."""
    return _import(result, "view").view(result, top)  # type: ignore[no-any-return]


def answer(result: "Result") -> str:
    """Return the verdict, if there is one, with its doubts and the conclusion."""
    from quanterr.outputs.formatting import format_answer

    shown = view(result, 0)
    return shown.conclusion if shown.word is None else format_answer(shown.word, shown.doubts, shown.conclusion)


def brief(result: "Result") -> str:
    """Return the result in one line, for ``--quiet``; a ranking adds a line per candidate without a rank."""
    special = getattr(_import(result, "view"), "brief", None)
    return f"quanterr: {answer(result)}" if special is None else special(result)


def listing(result: "Result") -> ModuleType:
    """Return the module with the rows and test suites of a result."""
    return _import(result, result.ROWS)


def plot(document: "Document") -> "Figure":
    """Return a matplotlib Figure of a document.

    Raises:
        UsageError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        drawing = _import(document, "plot")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"plot(): there is nothing to draw: this kind of result, {document.noun}, has no figure"
        ) from error
    return drawing.plot(document)  # type: ignore[no-any-return]


def render_notebook(result: "Result") -> str:
    """Return the HTML of a result in a notebook."""
    from quanterr.outputs.notebook import render

    return render(result)


def save(result: "Result", path: str | PathLike[str]) -> None:
    """Write a result to a file; the suffix chooses the output.

    Raises:
        UsageError: the suffix is unknown.
        ResourceError: the file cannot be written.
    """
    from quanterr.documents.diff.base import Difference
    from quanterr.outputs import CANDIDATE_OUTPUTS, DIFF_OUTPUTS, OUTPUTS
    from quanterr.outputs.files import check_targets, write_output

    outputs = CANDIDATE_OUTPUTS if hasattr(result, "candidates") else OUTPUTS
    outputs = DIFF_OUTPUTS if isinstance(result, Difference) else outputs
    for target in check_targets([fspath(path)], [], outputs=outputs, option="save()"):
        write_output(result, target, "save()")


def _import(result: "Result", name: str) -> ModuleType:
    package = type(result).__module__.removeprefix("quanterr.documents.").rpartition(".")[0]
    return import_module(f"quanterr.views.{package}.{name}")
