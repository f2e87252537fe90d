"""The diff of two results of one kind: reports, rankings, evaluations or plans."""

from os import PathLike, fspath
from typing import TYPE_CHECKING, cast, overload

from quanterr.errors import UsageError
from quanterr.report.documents import KINDS, Kind, kind_of, read_document
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.diff.candidates import CandidateDiff
    from quanterr.report.diff.model import Diff
    from quanterr.report.document import Document
    from quanterr.report.model import Report
    from quanterr.report.reading import Extract

    Stored = str | PathLike[str] | Document


@overload
def diff(old: "Report", new: "Report", force: bool = False) -> "Diff": ...
@overload
def diff(old: "Stored", new: "Stored", force: bool = False) -> "Diff | CandidateDiff": ...
def diff(old: "Stored", new: "Stored", force: bool = False) -> "Diff | CandidateDiff":
    """Compare a result with a newer one of the same original.

    ``old`` and ``new`` are two reports, rankings, evaluations or plans, or paths of such files. ``force`` compares them
    even if their originals, selections, texts or settings differ.

    Raises:
        UsageError: the results are of different kinds, or not comparable without ``force``.
        ReportError: a file is missing, damaged or no such result.
    """
    kinds, names = (_kind(old), _kind(new)), (_name(old), _name(new))
    if kinds[0] != kinds[1]:
        for one, kind in zip((old, new), kinds, strict=True):
            if kind.name == "Report":
                _report(one)  # raises if the file is missing or damaged, as such a file counts as a report
        words = [f"{display(name)} is of kind {kind.name.lower()}" for name, kind in zip(names, kinds, strict=True)]
        raise UsageError(f"{', '.join(words)}: only two results of the same kind can be compared")
    if kinds[0].name == "Report":
        from quanterr.report.diff.reports import difference_of

        return difference_of(_report(old), _report(new), names, force)
    from quanterr.report.diff.candidates import candidates_of

    return candidates_of(kinds[0], _document(old), _document(new), names, force)


def _report(one: "Stored") -> "Extract":
    from quanterr.report.diff.reports import of_report

    return of_report(cast("str | Report", one))


def _kind(one: "Stored") -> Kind:
    if isinstance(one, str | PathLike):
        return kind_of(fspath(one))
    found = next((kind for kind in KINDS.values() if kind.name == type(one).__name__), None)
    if found is None:
        raise UsageError(
            f"cannot compare a {type(one).__name__}; give reports, rankings, evaluations, plans, or paths of such files"
        )
    return found


def _document(one: "Stored") -> "Document":
    return read_document(fspath(one)) if isinstance(one, str | PathLike) else one


def _name(one: "Stored") -> str:
    if isinstance(one, str | PathLike):
        return fspath(one)
    return cast("Report", one).quantized.path if type(one).__name__ == "Report" else type(one).__name__.lower()
