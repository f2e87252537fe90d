"""Rules over an evaluation: ``kld_mean <= 0.01``, ``upper(kld_mean) <= 0.01``, ``lower(top1) >= 0.98``.

``upper`` and ``lower`` are the ends of an interval of 95 %: 1.96 standard errors, of the larger of both that there are.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from quanterr.errors import Status, UsageError
from quanterr.report.evaluation.model import METRICS, Evaluated, Evaluation
from quanterr.report.gate_results import Gate, Violation
from quanterr.util.text import decisive, display

WIDTH = 1.96  # standard errors
_RULE = re.compile(
    r"\s*(?:(?P<end>upper|lower)\s*\(\s*(?P<inner>\w+)\s*\)|(?P<metric>\w+))\s*(?P<operator><=|>=|<|>)"
    r"\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*",
    re.ASCII,
)


class Rule(NamedTuple):
    """A condition that must hold."""

    text: str
    metric: str
    end: str | None  # upper or lower: not the value but an end of its interval
    operator: str
    limit: float

    def observed(self, candidate: Evaluated) -> float | None:
        """The value of a candidate; None where it is undefined."""
        value = candidate.value(self.metric)
        if value is None or self.end is None:
            return value
        errors = [candidate.value(f"{self.metric}{suffix}") for suffix in ("_se", "_chunk_se")]
        known = [error for error in errors if error is not None]
        if not known:
            return None
        return value + (WIDTH if self.end == "upper" else -WIDTH) * max(known)

    def margin(self, value: float) -> float:
        """How far inside the limit: negative outside."""
        return self.limit - value if self.operator in ("<", "<=") else value - self.limit

    def holds(self, value: float) -> bool:
        """Whether a value satisfies it."""
        margin = self.margin(value)
        return margin >= 0 if self.operator.endswith("=") else margin > 0


def rules_of(conditions: Sequence[str]) -> list[Rule]:
    """Rules as they are written.

    Raises:
        UsageError: none, or of a number that an evaluation does not have.
    """
    return [_rule(text) for text in conditions]


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise UsageError(f'"{display(text)}" is no rule of an evaluation; write one such as "kld_mean <= 0.01"')
    metric = found["inner"] or found["metric"]
    if metric not in METRICS:
        near = get_close_matches(metric, METRICS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METRICS)}"
        raise UsageError(f'"{display(text)}": an evaluation has no {display(metric)}; {hint}')
    if found["end"] and f"{metric}_se" not in METRICS:
        raise UsageError(f'"{display(text)}": {metric} has no standard error; write it without {found["end"]}()')
    return Rule(text.strip(), metric, found["end"], found["operator"], float(found["limit"]))


def judged(evaluation: Evaluation, rules: Sequence[Rule]) -> Evaluation:
    """The evaluation with its candidates judged; one that is inconclusive stays so."""
    if not rules:
        return evaluation
    candidates = [_judged(candidate, rules) for candidate in evaluation.candidates]
    verdict, reasons = overall(candidates)
    return evaluation.model_copy(update={"candidates": candidates, "verdict": verdict, "reasons": reasons})


def exit_status(evaluation: Evaluation, allow_partial: bool = False) -> Status:
    """The status an evaluation ends with: an unreliable result outranks a gate that does not hold."""
    if evaluation.verdict == "inconclusive" and not allow_partial:
        return Status.INCONCLUSIVE
    failed = any(gate.status == "fail" for candidate in evaluation.candidates for gate in candidate.gates)
    return Status.GATE_FAILED if failed else Status.OK


def overall(candidates: Sequence[Evaluated]) -> tuple[str, list[str]]:
    """Verdict and reasons of all candidates together."""
    verdicts = [candidate.verdict for candidate in candidates]
    verdict = next((word for word in ("inconclusive", "fail") if word in verdicts), "pass")
    reasons = [
        f"{candidate.name}: {reason}"
        for candidate in candidates
        if candidate.verdict == verdict != "pass"
        for reason in candidate.reasons
    ]
    return verdict, reasons or [candidates[0].reasons[0]]


def _judged(candidate: Evaluated, rules: Sequence[Rule]) -> Evaluated:
    gates = [_gate(rule, candidate) for rule in rules]
    failed = [gate.message for gate in gates if gate.status == "fail"]
    verdict, reasons = candidate.verdict, candidate.reasons
    if verdict != "inconclusive":
        verdict = "fail" if failed else "pass"
        reasons = failed or ["all gates hold"]
    values = {name: getattr(candidate, name) for name in candidate.__dataclass_fields__}
    return Evaluated(**values | {"verdict": verdict, "reasons": reasons, "gates": gates})


def _gate(rule: Rule, candidate: Evaluated) -> Gate:
    value = rule.observed(candidate)
    holds = value is not None and rule.holds(value)
    margin = None if value is None else rule.margin(value)
    shown = "undefined" if value is None else decisive(value, rule.limit)
    message = f"gate {rule.text} {'holds' if holds else 'does not hold'}: {shown}"
    return Gate(
        id=rule.text,
        require=rule.text,
        layers=[],
        severity="error",
        reason=None,
        status="pass" if holds else "fail",
        judged=0,
        identical=0,
        skipped=0,
        observed=value,
        limit=rule.limit,
        margin=margin,
        worst_layer=None,
        violations=[] if holds else [Violation(None, value, margin, None if value is not None else "undefined")],
        message=message,
    )
