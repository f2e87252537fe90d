"""Gates: rules that a report has to satisfy.

    rules.py         from a thresholds file, a preset or the command line
    expression.py    the language of their conditions
    selecting.py     the layers that a rule is about
    judging.py       which hold, and by how much
    fail_fast.py     what a single layer violates, while others are still to come
    explaining.py    what a gate means, in words
    as_text.py       what is reported of them; github.py: on GitHub

What rules may name in a document, and what they see of it, is in its ``values.py`` beside its model (report/subjects.py
says what that has).

To add a function: a row of FUNCTIONS.
"""

import os
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from quanterr.errors import UsageError
from quanterr.gates.judging import judge_subject, needed
from quanterr.gates.rules import Rule, check_baseline_use, read_rules
from quanterr.options import GateOptions
from quanterr.report import SCHEMA as REPORT
from quanterr.report.documents import KINDS, DocumentKind, find_kind, read_document
from quanterr.report.gate_results import Verdict
from quanterr.report.reading import read_extract
from quanterr.report.subjects import Subject, find_counterpart
from quanterr.report.values import ReportValues
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.document import Document

    Judged = TypeVar("Judged", bound=Document)


class Prepared(NamedTuple):
    """Rules, and what they compare with: read before any work, so that a mistake in them costs no run."""

    rules: list[Rule]
    before: list[Subject]

    def judge(self, document: "Judged") -> "Judged":
        """The document, judged; as it is where there are no rules."""
        return judged(document, self.rules, self.before) if self.rules else document


def prepare(options: GateOptions, kind: DocumentKind = KINDS[REPORT]) -> Prepared:
    """The rules that are asked for, of a kind of document.

    Raises:
        UsageError: a rule that cannot be understood, a file that is none, a baseline that cannot be relied on, is not
            needed or not given.
        ReportError: a baseline that cannot be read.
    """
    given = options.baseline is not None
    if not given and options.thresholds is None and not (options.require or options.fail_if):
        return Prepared([], [])
    rules = read_rules(
        options.thresholds, options.require, options.fail_if, options.strict_warnings, given, kind.values.VOCABULARY
    )
    check_baseline_use(rules, given)
    before = [] if options.baseline is None else read_subjects(os.fspath(options.baseline), rules, kind)
    for subject in before:
        subject.check_usable()
    return Prepared(rules, before)


def read_subjects(path: str, rules: list[Rule], kind: DocumentKind) -> list[Subject]:
    """What is judged of a stored document; of a report what rules need alone, which is faster.

    Raises:
        UsageError: it is a document of another kind.
        ReportError: it cannot be read.
    """
    found = find_kind(path)
    if found != kind:
        kinds = f"is of another kind ({found.name.lower()}) than what is judged ({kind.name.lower()})"
        raise UsageError(f"--baseline {display(path)}: {kinds}")
    if kind == KINDS[REPORT]:
        return [ReportValues(read_extract(path, *needed(rules)))]
    return subjects_of(read_document(path), rules)


def judge(
    document: "Judged",
    thresholds: str | os.PathLike[str] | None = None,
    *,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: "Judged | None" = None,
) -> "Judged":
    """A report, ranking or evaluation, judged: the same with new ``gates``, ``verdict`` and ``reasons``.

    Args:
        document: of :func:`quanterr.compare`, :func:`quanterr.rank`, :func:`quanterr.evaluate`, or read from a file.
        thresholds: a thresholds file, or the name of a preset for reports.
        require: conditions that have to hold, such as ``snr_db >= 30`` or ``upper(kld_mean) <= 0.01``.
        fail_if: conditions that must not hold; what is undefined fails these too.
        baseline: an older one of its kind, for rules with ``delta``, ``rel_delta`` or ``ratio``; alone it asks for
            ``delta(snr_db) >= -0.5`` of a report, ``ratio(kld_mean) <= 1.1`` of an evaluation.

    Raises:
        UsageError: no rule, one that cannot be understood, a pattern that matches nothing, a baseline that cannot be
            relied on, is of another original, selection or text, that no rule compares with, or is not given and
            needed; a plan, which has no verdict.
    """
    vocabulary = _values(document).VOCABULARY
    rules = read_rules(thresholds, require, fail_if, baseline=baseline is not None, vocabulary=vocabulary)
    check_baseline_use(rules, baseline is not None)
    return judged(document, rules, subjects_of(baseline, rules) if baseline else ())


def judged(document: "Judged", rules: list[Rule], before: Sequence[Subject] = ()) -> "Judged":
    """The same with rules and the subjects of a baseline that were read before."""
    subjects = subjects_of(document, rules)
    return with_verdicts(document, subjects, verdicts_of(subjects, rules, before))


def verdicts_of(subjects: Sequence[Subject], rules: list[Rule], before: Sequence[Subject] = ()) -> list[Verdict]:
    """The verdict on each, compared with its counterpart of a baseline."""
    return [judge_subject(subject, rules, find_counterpart(subject, before)) for subject in subjects]


def with_verdicts(document: "Judged", subjects: Sequence[Subject], verdicts: Sequence[Verdict]) -> "Judged":
    """The document with the verdicts on its subjects.

    Raises:
        UsageError: it stores none, as a plan.
    """
    values = _values(document)
    if not hasattr(values, "store_verdicts"):
        raise UsageError(f"a {values.VOCABULARY.document} stores no verdict")
    return values.store_verdicts(document, subjects, verdicts)  # type: ignore[no-any-return] # a module, by its kind


def subjects_of(document: "Document", rules: list[Rule]) -> list[Subject]:
    """What is judged of a document, with the metrics that rules look at."""
    of_items, of_model = needed(rules)
    return _values(document).list_subjects(document, of_items | of_model)  # type: ignore[no-any-return]


def _values(document: "Document") -> ModuleType:
    return KINDS[document.schema_].values
