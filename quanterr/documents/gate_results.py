"""Results of gates as plain data."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol, TypedDict

from quanterr.documents.base import Finding, Model
from quanterr.errors import Status
from quanterr.metrics.scores import doc
from quanterr.util.text import count, display

Word = Literal["pass", "fail", "inconclusive"]
Giver = Literal["result", "finding", "gate", "rules"]
Givers = Annotated[
    list[Giver] | None,
    doc("what gives each reason: the result, a finding, a gate, or rules that were not applied; null: not stored"),
]

BECAUSE = ", because: "  # precedes, in a gate's message, the finding that explains a number


class Violation(Model):
    """One reason why a gate does not hold: a layer, or the whole document where ``layer`` is null.

    ``observed`` is null without a finite number; ``reason`` then explains it. Otherwise ``reason`` is a finding that
    explains why the number is bad, or null. ``margin`` is the distance to the limit, negative beyond it.
    """

    layer: str | None
    observed: float | None
    margin: float | None
    reason: str | None


class Gate(Model):
    """The result of one rule.

    ``require`` is the rule's condition, ``layers`` its patterns (none: every layer), ``reason`` its author's
    justification. The rule judged ``judged`` layers, of which ``identical`` are the same on both sides and hold;
    ``skipped`` layers lack the metric. ``observed`` is the value of the condition in ``worst_layer``, the layer
    nearest to the limit or furthest beyond it, or over all layers together; null if undefined or infinite.
    ``margin`` is the distance to ``limit``, negative beyond it. ``violations`` lists all violations, the worst first. A
    gate of severity ``warn`` does not change the verdict. ``baseline_original`` says how the original of the baseline
    differs, if the rule accepts another one. A gate that ``is_unjudged`` had no number to judge, as the run was
    interrupted or a text too short; its status is ``fail``, so that nothing passes by it. ``item`` is the kind of item
    that the rule judges. ``waived`` lists violations that a user waived, each with the waiver as its reason.
    """

    id: str
    require: str
    layers: list[str]
    severity: Literal["error", "warn"]
    reason: str | None
    status: Literal["pass", "fail"]
    judged: int
    identical: int
    skipped: int
    observed: float | None
    limit: float
    margin: float | None
    worst_layer: str | None
    message: str
    violations: list[Violation]
    baseline_original: str | None = None
    is_unjudged: bool = False
    item: str = "layer"
    waived: tuple[Violation, ...] = ()


class Reason(NamedTuple):
    """A reason of a verdict.

    It is given by the ``result`` itself, a ``finding`` of the document, a ``gate`` whose message it is, or by ``rules``
    or a baseline that could not be used, so that other rules may judge the document.
    """

    text: str
    by: Giver


class StoredReasons(TypedDict):
    """The fields of a document that hold the reasons of its verdict."""

    reasons: list[str]
    reasons_by: list[Giver]


class Verdict(NamedTuple):
    """The verdict on one subject, with its reasons and gates; ``reasons_by`` says where each reason comes from."""

    verdict: Word
    reasons: list[str]
    gates: list[Gate]
    reasons_by: Givers = None


class HasGates(Protocol):
    """Anything with a verdict: a report, a ranking, an evaluation, one of their candidates, or a :class:`Verdict`."""

    @property
    def verdict(self) -> Word:
        """The verdict on the whole."""

    @property
    def reasons(self) -> Sequence[str]:
        """The reasons for the verdict."""

    @property
    def reasons_by(self) -> Sequence[Giver] | None:
        """Where each reason comes from; None in older documents."""

    @property
    def gates(self) -> Sequence[Gate]:
        """The results of all gates."""


def list_reasons(judged: HasGates) -> list[Reason]:
    """Return the reasons of a verdict; in older documents, those that are no gate's message belong to the result."""
    if judged.reasons_by is not None and len(judged.reasons_by) == len(judged.reasons):
        return list(map(Reason, judged.reasons, judged.reasons_by))
    messages = {gate.message for gate in judged.gates}
    return [Reason(text, "gate" if text in messages else "result") for text in judged.reasons]


def store_reasons(reasons: Iterable[Reason]) -> StoredReasons:
    """Return reasons as fields of a document or a :class:`Verdict`."""
    known = list(reasons)
    return {"reasons": [reason.text for reason in known], "reasons_by": [reason.by for reason in known]}


def list_other_reasons(judged: HasGates) -> list[str]:
    """Return the reasons that do not come from a gate: outputs show gates separately."""
    return [reason.text for reason in list_reasons(judged) if reason.by != "gate"]


def list_errors(findings: Sequence[Finding]) -> list[Reason]:
    """Return a reason for each code of findings that are errors."""
    errors: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.severity == "error":
            errors.setdefault(finding.code, []).append(finding)
    more = {code: f" (and {count(len(same) - 1, 'more layer')})" for code, same in errors.items() if len(same) > 1}
    return [Reason(f"{same[0].message}{more.get(code, '')}", "finding") for code, same in errors.items()]


def list_damage(judged: object) -> list[str]:
    """Return the messages of errors about a result or its candidates, but not about tensors that were not compared."""
    lost = {getattr(left, "layer_name", None) for left in getattr(judged, "not_compared", ())} - {None}
    candidates = getattr(judged, "candidates", ())
    findings = [finding for part in (judged, *candidates) for finding in getattr(part, "findings", ())]
    return [finding.message for finding in findings if finding.severity == "error" and finding.layer not in lost]


def list_waived(judged: object) -> list[str]:
    """Return a text for each finding of a result that a user waived."""
    return [
        f"{finding.code}{f' of {display(finding.layer)}' if finding.layer else ''} until {finding.waived.until}: "
        f"{display(finding.waived.reason)}"
        for finding in getattr(judged, "findings", ())
        if finding.waived
    ]


def exit_status(judged: HasGates, allow_partial: bool = False, damage: Sequence[str] | None = None) -> Status:
    """Return the exit status of a judged result; an inconclusive verdict outranks a gate that does not hold.

    ``allow_partial`` ignores an inconclusive verdict unless there is ``damage``; None asks :func:`list_damage` for it.
    """
    damaged = list_damage(judged) if damage is None else damage
    if judged.verdict == "inconclusive" and (damaged or not allow_partial):
        return Status.INCONCLUSIVE
    failed = any(gate.status == "fail" and gate.severity == "error" for gate in judged.gates)
    return Status.GATE_FAILED if failed else Status.OK
