"""Gates: rules that a document has to satisfy.

    rules.py         reads rules from a thresholds file, a preset or the command line
    expression.py    parses their conditions
    selectors.py     finds the layers that a rule applies to
    waivers.py       accepts known faults until a day
    verdicts.py      decides which rules hold, and by how much
    fail_fast.py     finds the first layer that violates a rule, while others are still being compared
    explanation.py   explains why a layer passes or not
    plan_check.py    compares a report with the plan that it was made from
    as_text.py       prints the results; github.py prints them on GitHub

For each type of document, ``values.py`` next to its model declares the metrics that rules may name, in the form that
documents/subjects.py defines.

To add a function, add a row to FUNCTIONS.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from msgspec.structs import replace

from quanterr.documents.comparison import SCHEMA as REPORT
from quanterr.documents.comparison.values import NEEDS, SHARES, ReportValues
from quanterr.documents.gate_results import Verdict
from quanterr.documents.kinds import KINDS, DocumentKind, find_kind, read_document
from quanterr.documents.reading import read_report, require_unedited
from quanterr.documents.subjects import Subject, combine_verdicts, find_counterpart
from quanterr.errors import UsageError
from quanterr.gates.rules import Rule, check_baseline_use, read_rules
from quanterr.gates.verdicts import judge_subject, list_needed_metrics
from quanterr.gates.waivers import Waiver, list_notes, waive_findings
from quanterr.options import CompareOptions, GateOptions, Path, Result
from quanterr.util.arguments import check_types
from quanterr.util.text import display, with_article

if TYPE_CHECKING:
    from quanterr.documents.document import Document

    DocumentT = TypeVar("DocumentT", bound=Document)


class PreparedRules(NamedTuple):
    """Rules and their baseline, read before any work so that a mistake in them costs no run."""

    rules: list[Rule]
    before: list[Subject]

    @property
    def runtimes(self) -> list[str]:
        """The programs that have to load the checkpoint."""
        return [rule.condition.metric for rule in self.rules if rule.condition.scope == "loading"]

    def judge(self, document: "DocumentT") -> "DocumentT":
        """Return the document with verdicts; unchanged if there are no rules."""
        return apply_rules(document, self.rules, self.before) if self.rules else document


def prepare(
    options: GateOptions, document_kind: DocumentKind = KINDS[REPORT], *, required: bool = False, updated: bool = False
) -> PreparedRules:
    """Read the rules and the baseline that the options name, for one type of document.

    ``updated`` means that the baseline is about to be overwritten, so that rules need not use it.

    Raises:
        UsageError: a rule that cannot be parsed, an invalid thresholds file, a baseline that is unreliable, missing or
            not used by any rule; or there is no rule although one is ``required``.
        ReportError: the baseline cannot be read.
    """
    given = options.baseline is not None
    if not required and not options.has_rules:
        return PreparedRules([], [])
    any_original = options.baseline_original == "any"
    if any_original and not given:
        raise UsageError("--baseline-original any: give --baseline REPORT")
    rules = read_rules(
        options.thresholds,
        options.require,
        options.fail_if,
        options.strict_warnings,
        given,
        document_kind.values.VOCABULARY,
        any_original,
    )
    check_baseline_use(rules, given, updated)
    _check_needs(rules, options)
    before = (
        []
        if options.baseline is None
        else _read_baseline(options.baseline, rules, document_kind, options.strict_warnings)
    )
    for subject in before:
        subject.check_usable()
    return PreparedRules(rules, before)


def _check_needs(rules: list[Rule], options: GateOptions) -> None:
    """Raise UsageError if a metric is undefined in every layer, as it needs an option that is not given."""
    if not isinstance(options, CompareOptions):
        return
    for rule in rules:
        if rule.condition.metric in SHARES.values() and not options.every_code:
            raise UsageError(f"{display(rule.condition.text)}: {rule.condition.metric} needs --every-code")
        needs = NEEDS.get(rule.condition.metric)
        if needs and getattr(options, needs) is None and rule.undefined == "fail":
            raise UsageError(f"{display(rule.condition.text)}: {rule.condition.metric} needs --{needs} FILE")


def _read_baseline(
    baseline: Path | Result, rules: list[Rule], document_kind: DocumentKind, strict: bool
) -> list[Subject]:
    """Return the subjects of a baseline: a document, or a file, which with ``strict`` must not have been edited.

    Raises:
        UsageError: the baseline is a document of another type.
        ReportError: the file cannot be read, or was edited.
    """
    if isinstance(baseline, str | os.PathLike):
        return read_subjects(os.fspath(baseline), rules, document_kind, compared=True, strict=strict)
    _check_kind(KINDS.get(baseline.schema_), document_kind, with_article(type(baseline).__name__))
    return list_subjects_of(waive_findings(baseline, find_waivers(rules)))  # type: ignore[arg-type,type-var] # a document


def _check_kind(given: DocumentKind | None, wanted: DocumentKind, name: str) -> None:
    if given != wanted:
        given_name = "another" if given is None else given.name.lower()
        kinds = f"the kind of the baseline ({given_name}) differs from the document's ({wanted.name.lower()})"
        raise UsageError(f"--baseline {name}: {kinds}")


def read_subjects(
    path: str, rules: list[Rule], document_kind: DocumentKind, compared: bool, strict: bool = False
) -> list[Subject]:
    """Read the subjects of a stored document; of a report only what the rules need, which is faster.

    ``compared`` means that there is a baseline, which must have the same original, and ``strict`` that a document must
    not have been edited.

    Raises:
        UsageError: the document is of another type.
        ReportError: the document cannot be read, or was edited.
    """
    if strict:
        require_unedited(path)
    _check_kind(find_kind(path), document_kind, display(path))
    if document_kind == KINDS[REPORT]:
        report = read_report(path, list_needed_metrics(rules, compared), judged=False)
        return [ReportValues(waive_findings(report, find_waivers(rules)))]
    return list_subjects_of(waive_findings(read_document(path), find_waivers(rules)))


def judge(
    document: "DocumentT | str | os.PathLike[str]",
    thresholds: str | os.PathLike[str] | None = None,
    *,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    baseline: "DocumentT | str | os.PathLike[str] | None" = None,
    baseline_original: Literal["same", "any"] = "same",
) -> "DocumentT":
    """Return a report, ranking, evaluation or comparison of images with new ``gates``, ``verdict`` and ``reasons``.

    Args:
        document: from :func:`quanterr.compare`, :func:`quanterr.rank` or :func:`quanterr.evaluate`, or a file of it.
        thresholds: a thresholds file, or the name of a preset for reports.
        require: conditions that must hold, such as ``snr_db >= 30`` or ``upper(kld_mean) <= 0.01``.
        fail_if: conditions that must not hold; undefined values fail these too.
        baseline: an older document of the same kind, or its file, for rules with ``delta``, ``rel_delta`` or ``ratio``.
            Without such a rule it adds ``delta(snr_db) >= -0.5`` for a report, ``ratio(kld_mean) <= 1.1`` for an
            evaluation, ``delta(ssim) >= -0.01`` for images.
        baseline_original: ``"any"`` accepts a baseline of another original with the same names and sizes of layers.

    Raises:
        UsageError: there is no rule; a rule cannot be parsed; a pattern matches nothing; the baseline is unreliable,
            unused or missing, or has another original, selection or text; the document is a plan or an inspection,
            which has no verdict.
    """
    judged, before = _load_document("document", document), None
    if baseline is not None:
        before = _load_document("baseline", baseline)
    rules = read_rules(
        thresholds,
        require,
        fail_if,
        baseline=before is not None,
        vocabulary=_find_values(judged).VOCABULARY,
        any_original=baseline_original == "any",
    )
    check_baseline_use(rules, before is not None)
    older = list_subjects_of(waive_findings(before, find_waivers(rules))) if before else ()
    return apply_rules(judged, rules, older)


def _load_document(name: str, given: "DocumentT | str | os.PathLike[str]") -> "DocumentT":
    """Return the document, which is read if a file is given."""
    if not isinstance(given, str | os.PathLike):
        check_types({name: given}, {name: Path | Result})
        return given
    return read_document(given)  # type: ignore[return-value]


def apply_rules(document: "DocumentT", rules: list[Rule], before: Sequence[Subject] = ()) -> "DocumentT":
    """Return the document with verdicts by rules and baseline subjects that were read before."""
    waivers = find_waivers(rules)
    document = waive_findings(document, waivers)
    subjects = list_subjects_of(document)
    verdicts = judge_subjects(subjects, rules, before)
    warn_of_waivers(waivers, verdicts, document)
    return store_verdicts(document, subjects, verdicts)


def find_waivers(rules: Sequence[Rule]) -> tuple[Waiver, ...]:
    """Return the waivers of the file from which rules come."""
    return rules[0].waivers if rules else ()


def warn_of_waivers(waivers: Sequence[Waiver], verdicts: Sequence[Verdict], document: "Document") -> None:
    """Print to stderr which waivers have expired, or are no longer needed."""
    gates = [gate for verdict in verdicts for gate in verdict.gates]
    findings = [
        finding
        for candidate in getattr(document, "candidates", [document])
        for finding in getattr(candidate, "findings", ())
    ]
    for note in list_notes(waivers, gates, findings):
        print(f"quanterr: note: {note}", file=sys.stderr)


def judge_subjects(subjects: Sequence[Subject], rules: list[Rule], before: Sequence[Subject] = ()) -> list[Verdict]:
    """Return the verdict on each subject, compared with its counterpart in a baseline."""
    return [judge_subject(subject, rules, find_counterpart(subject, before)) for subject in subjects]


def store_verdicts(document: "DocumentT", subjects: Sequence[Subject], verdicts: Sequence[Verdict]) -> "DocumentT":
    """Return the document with the verdicts on its subjects.

    Raises:
        UsageError: the document stores no verdicts, such as a plan.
    """
    if not hasattr(document, "verdict"):
        raise UsageError(f"{with_article(document.noun)} stores no verdict")
    whole = combine_subject_verdicts(subjects, verdicts)
    update = whole._asdict() | {"gated": bool(whole.gates)}
    candidates = getattr(document, "candidates", None)
    if candidates is None:
        return replace(document, **update)
    del update["gates"]  # each candidate has gates of its own
    judged = [replace(candidate, **verdict._asdict()) for candidate, verdict in zip(candidates, verdicts, strict=True)]
    return replace(document, **update, candidates=judged)


def combine_subject_verdicts(subjects: Sequence[Subject], verdicts: Sequence[Verdict]) -> Verdict:
    """Return the joint verdict on the subjects of a document, with the gates of all."""
    if subjects[0].name is None:
        return verdicts[0]
    by_name = {subject.name or "": verdict for subject, verdict in zip(subjects, verdicts, strict=True)}
    word, reasons = combine_verdicts(by_name)
    return Verdict(word, gates=[gate for verdict in verdicts for gate in verdict.gates], **reasons)


def list_subjects_of(document: "Document") -> list[Subject]:
    """Return the subjects of a document."""
    return _find_values(document).list_subjects(document)  # type: ignore[no-any-return]


def _find_values(document: "Document") -> ModuleType:
    return KINDS[document.schema_].values
