"""The diff of two results of one kind: reports, rankings, evaluations or plans."""

from os import PathLike, fspath
from typing import TYPE_CHECKING, cast, overload

from quanterr.documents.kinds import KINDS, DocumentKind, find_kind, read_document
from quanterr.errors import UsageError
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.documents.comparison.model import Report
    from quanterr.documents.diff.candidates.model import CandidateDiff
    from quanterr.documents.diff.reports.model import Diff
    from quanterr.documents.document import Document

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
    kinds, names = (_find_kind(old), _find_kind(new)), (_pick_name(old), _pick_name(new))
    if kinds[0] != kinds[1]:
        for one, kind in zip((old, new), kinds, strict=True):
            if kind.name == "Report":
                _read_extract(one)  # raises if the file is missing or damaged, as such a file counts as a report
        words = [f"{display(name)} is of kind {kind.name.lower()}" for name, kind in zip(names, kinds, strict=True)]
        raise UsageError(f"{', '.join(words)}: only two results of the same kind can be compared")
    if kinds[0].name == "Report":
        from quanterr.documents.diff.reports.making import diff_reports

        return diff_reports(_read_extract(old), _read_extract(new), names, force)
    from quanterr.documents.diff.candidates.model import diff_candidates

    return diff_candidates(kinds[0], _load_document(old), _load_document(new), names, force)


def _read_extract(one: "Stored") -> "Report":
    """Return a report; a stored one with what diffs need of its layers."""
    from quanterr.documents.diff.reports.making import METRICS
    from quanterr.documents.reading import read_report

    return read_report(one, METRICS) if isinstance(one, str | PathLike) else cast("Report", one)


def _find_kind(one: "Stored") -> DocumentKind:
    if isinstance(one, str | PathLike):
        return find_kind(fspath(one))
    found = next((kind for kind in KINDS.values() if kind.name == type(one).__name__), None)
    if found is None:
        raise UsageError(
            f"cannot compare a {type(one).__name__}; give reports, rankings, evaluations, plans, or paths of such files"
        )
    return found


def _load_document(one: "Stored") -> "Document":
    return read_document(fspath(one)) if isinstance(one, str | PathLike) else one


def _pick_name(one: "Stored") -> str:
    if isinstance(one, str | PathLike):
        return fspath(one)
    return cast("Report", one).quantized.path if type(one).__name__ == "Report" else type(one).__name__.lower()
