"""The diff of two results of the same kind, item by item."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot
from os import PathLike, fspath
from typing import NamedTuple, TypeVar, cast, overload

from quanterr.differences.layers import REPORTED, compare_levels
from quanterr.documents.comparison import NORM
from quanterr.documents.comparison.model import Report
from quanterr.documents.comparison.values import ReportValues
from quanterr.documents.diff.base import Changes
from quanterr.documents.diff.candidates import model as candidates
from quanterr.documents.diff.candidates.model import CandidateChange, CandidateDiff, MetricChange, Word
from quanterr.documents.diff.reports import model as reports
from quanterr.documents.diff.reports.model import Diff, FormatChange, Totals
from quanterr.documents.document import Document
from quanterr.documents.kinds import KINDS, DocumentKind, find_kind, read_document
from quanterr.documents.reading import read_report
from quanterr.documents.subjects import HALF_WIDTH, Item, Subject
from quanterr.errors import UsageError
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

LAYER_FIELDS = ("format", "snr_db", "excess_db", NORM)  # fields of layers that diffs read
AGGREGATES = ("overall_snr_db", "excess_db", "bits_per_weight")
Stored = str | PathLike[str] | Document
Named = TypeVar("Named")
Pairs = list[tuple[Named, Named]]


@overload
def diff(old: Report, new: Report, force: bool = False) -> Diff: ...
@overload
def diff(old: Stored, new: Stored, force: bool = False) -> Diff | CandidateDiff: ...
def diff(old: Stored, new: Stored, force: bool = False) -> Diff | CandidateDiff:
    """Compare a result with a newer one of the same original.

    ``old`` and ``new`` are two reports, rankings, evaluations or plans, or paths of such files. ``force`` compares them
    even if their originals, selections, texts or settings differ.

    Raises:
        UsageError: the results are of different kinds, or not comparable without ``force``.
        ReportError: a file is missing, damaged or not such a result.
    """
    kinds, names = (_find_kind(old), _find_kind(new)), (_pick_name(old), _pick_name(new))
    if kinds[0] != kinds[1]:
        for result, document_kind in zip((old, new), kinds, strict=True):
            if document_kind.name == "Report":
                _load(result, document_kind)  # raises for a missing or damaged file, whose kind is reported as Report
        words = [
            f"{display(name)} is of kind {document_kind.name.lower()}"
            for name, document_kind in zip(names, kinds, strict=True)
        ]
        raise UsageError(f"{', '.join(words)}: only two results of the same kind can be compared")
    before, after = (_load(result, kinds[0]) for result in (old, new))
    if kinds[0].name == "Report":
        return diff_reports(cast(Report, before), cast(Report, after), names, force)
    return diff_candidates(kinds[0], before, after, names, force)


def _load(result: Stored, document_kind: DocumentKind) -> Document:
    """Return a document; the layers of a stored report have only the fields that diffs need."""
    if not isinstance(result, str | PathLike):
        return result
    return read_report(result, LAYER_FIELDS) if document_kind.name == "Report" else read_document(fspath(result))


def _find_kind(result: Stored) -> DocumentKind:
    if isinstance(result, str | PathLike):
        return find_kind(fspath(result))
    document_kind = next(
        (document_kind for document_kind in KINDS.values() if document_kind.name == type(result).__name__), None
    )
    if document_kind is None:
        raise UsageError(
            f"cannot compare a {type(result).__name__}; "
            "give reports, rankings, evaluations, plans, or paths of such files"
        )
    return document_kind


def _pick_name(result: Stored) -> str:
    if isinstance(result, str | PathLike):
        return fspath(result)
    return cast(Report, result).quantized.path if type(result).__name__ == "Report" else type(result).__name__.lower()


def _check_comparable(how: Changes, old: Document, new: Document, names: tuple[str, str], force: bool) -> str | None:
    """Return why two results are not comparable; None if they are.

    Raises:
        UsageError: the results are not comparable, and ``force`` is False.
    """
    why = how.find_difference(old, new)
    if why and not force:
        before, after = map(display, names)
        raise UsageError(f"{before} cannot be compared with {after}: {why}; use --force to compare anyway")
    return why


def _pair_up(old: Mapping[str, Named], new: Mapping[str, Named]) -> tuple[Pairs[Named], list[str], list[str]]:
    """Return the items that both documents have, in pairs, and the names of new items and of missing ones."""
    both = [(old[name], item) for name, item in new.items() if name in old]
    return both, [name for name in new if name not in old], [name for name in old if name not in new]


def _compare_items(how: Changes, old: Iterable[Item], new: Iterable[Item]) -> tuple[Pairs[Item], JsonObject]:
    """Return the items of both documents in pairs, and the fields of a diff about items, the largest change first."""
    both, added, gone = _pair_up(*({item.name: item for item in items} for items in (old, new)))
    changed = sorted(filter(None, (how.compare(*pair) for pair in both)), key=lambda change: -abs(change[0]))
    worse, better = [item for by, item in changed if by > 0], [item for by, item in changed if by <= 0]
    unchanged = len(both) - len(changed)
    return both, {"worse": worse, "better": better, "unchanged": unchanged, "added": added, "gone": gone}


def diff_reports(old: Report, new: Report, paths: tuple[str, str], force: bool = False) -> Diff:
    """Compare two reports, whose layers have at least :data:`LAYER_FIELDS`.

    Raises:
        UsageError: originals, selections or settings differ, and ``force`` is False.
    """
    how = REPORTED
    why = _check_comparable(how, old, new, paths, force)
    both, changes = _compare_items(how, *(ReportValues(report).items for report in (old, new)))
    levels = [compare_levels(*pair) for pair in both]
    undefined = [report.name for report in levels if report.old_snr_db is None and report.new_snr_db is None]
    return Diff(
        schema=reports.SCHEMA,
        schema_version=reports.SCHEMA_VERSION,
        difference=why,
        old=_summarize(paths[0], old),
        new=_summarize(paths[1], new),
        format_changes=[change for pair in both for change in _compare_formats(*pair)],
        undefined=undefined,
        layers=levels,
        **changes | {"unchanged": changes["unchanged"] - len(undefined)},
    )


def _summarize(path: str, report: Report) -> Totals:
    aggregate = {name: getattr(report.aggregate, name) for name in AGGREGATES}
    return Totals(path, report.verdict, len(report.layers), **aggregate, quantized_bytes=report.quantized.bytes)


def _compare_formats(was: Item, now: Item) -> Iterator[FormatChange]:
    old, new = getattr(was.values, "format", None), getattr(now.values, "format", None)
    if old != new and old and new:
        yield FormatChange(now.name, old, new)


def diff_candidates(
    document_kind: DocumentKind, old: Document, new: Document, names: tuple[str, str], force: bool
) -> CandidateDiff:
    """Compare two documents of a kind, candidate by candidate.

    Raises:
        UsageError: originals, texts or settings differ, and ``force`` is False.
    """
    kind_name = document_kind.name.lower()
    how: Changes = document_kind.values.CHANGES
    why = _check_comparable(how, old, new, names, force)
    before, after = (_list_sides(document_kind, document) for document in (old, new))
    if len(before) == len(after) == 1:  # a single candidate is compared even if its name differs
        before = dict(zip(after, before.values(), strict=True))
    both, added, gone = _pair_up(before, after)
    changes = [_compare_sides(how, *pair) for pair in both]
    return CandidateDiff(f"quanterr.{kind_name}_diff", candidates.SCHEMA_VERSION, *names, why, changes, added, gone)


class CandidateSide(NamedTuple):
    """A candidate in one of both documents."""

    name: str
    verdict: str | None
    bytes: int | None
    subject: Subject


def _list_sides(document_kind: DocumentKind, document: Document) -> dict[str, CandidateSide]:
    """Return the candidates by name; a document without candidates counts as one that is named after its kind."""
    subjects: Sequence[Subject] = document_kind.values.list_subjects(document)
    names = [subject.name or document_kind.name.lower() for subject in subjects]
    candidates = getattr(document, "candidates", [document])
    return {
        name: CandidateSide(name, getattr(candidate, "verdict", None), getattr(candidate, "bytes", None), subject)
        for name, candidate, subject in zip(names, candidates, subjects, strict=True)
    }


def _compare_sides(how: Changes, was: CandidateSide, now: CandidateSide) -> CandidateChange:
    sides = ([item for item in side.subject.items if item.kind == how.item] for side in (was, now))
    _, changes = _compare_items(how, *sides)
    return CandidateChange(
        name=now.name,
        old_name=was.name,
        old_verdict=was.verdict,
        new_verdict=now.verdict,
        old_bytes=was.bytes,
        new_bytes=now.bytes,
        metrics=list(_compare_metrics(was.subject, now.subject)),
        **changes,
    )


def _compare_metrics(was: Subject, now: Subject) -> Iterator[MetricChange]:
    for metric, score in now.vocabulary.scores.items():
        old, new = was.whole.get(metric), now.whole.get(metric)
        if old is None or new is None:
            continue
        errors = was.errors.get(metric), now.errors.get(metric)
        error = hypot(*(e for e in errors if e is not None)) if None not in errors else None
        chance = None if error is None else abs(new - old) <= HALF_WIDTH * error
        word: Word = "unchanged" if new == old else "better" if (new < old) == (score.better == "lower") else "worse"
        yield MetricChange(metric, old, new, new - old, error, chance, word)
