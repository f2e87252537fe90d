"""Rules over an evaluation: ``kld_mean <= 0.01``, ``upper(kld_mean) <= 0.01``, ``delta(top1) >= -0.01``.

``upper`` and ``lower`` are the ends of an interval of 95 %: 1.96 standard errors, of the larger of both that there are.
Of fewer than eight chunks there is no such interval: the result is then inconclusive.
A candidate that is the original, or whose config.json or tokenizer differs from the original's, with which it was run,
is inconclusive under any rule.
``delta`` is the value less that of the baseline, ``ratio`` the one divided by the other: of the candidate of the same
name, or of the only one.

A thresholds file has them as ``[[rule]]`` tables with id, require, severity and reason: see quanterr/util/rule_file.py.
"""

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

from quanterr.errors import UsageError
from quanterr.report.evaluation.model import METRICS, Evaluated, Evaluation, difference
from quanterr.report.gate_results import Gate, Violation
from quanterr.util.rule_file import Table, rule_tables
from quanterr.util.text import decisive, display

WIDTH = 1.96  # standard errors
LEAST_CHUNKS = 8  # tokens of a chunk are no independent samples: of fewer chunks there is no interval
ANOTHER_MODEL = (
    "identical",
    "config_mismatch",
)  # findings: what was evaluated is not the quantized model that will run
OF_BASELINE = ("delta", "ratio")
KEYS = ("id", "require", "severity", "reason")  # of a rule in a file
NO_WORSE = "ratio(kld_mean) <= 1.1"  # the rule of a baseline where no other is given
_RULE = re.compile(
    r"\s*(?:(?P<function>upper|lower|delta|ratio)\s*\(\s*(?P<inner>\w+)\s*\)|(?P<metric>\w+))\s*(?P<operator><=|>=|<|>)"
    r"\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*",
    re.ASCII,
)


class Rule(NamedTuple):
    """A condition that must hold."""

    id: str
    text: str
    metric: str
    function: str | None  # upper or lower end of its interval; delta or ratio to the baseline
    operator: str
    limit: float
    severity: Literal["error", "warn"] = "error"
    reason: str | None = None

    def observed(self, candidate: Evaluated, before: Evaluated | None) -> float | None:
        """The value of a candidate, ``before`` being that of the baseline; None where it is undefined."""
        value = candidate.value(self.metric)
        if value is None or self.function is None:
            return value
        if self.function in OF_BASELINE:
            old = None if before is None else before.value(self.metric)
            if old is None:
                return None
            return value - old if self.function == "delta" else value / old if old else None
        error = candidate.error(self.metric)
        return None if error is None else value + (WIDTH if self.function == "upper" else -WIDTH) * error

    def unjudgeable(self, candidate: Evaluated) -> str | None:
        """Why it cannot be judged; None where it can."""
        chunks = candidate.scores.chunks if candidate.scores else None
        if self.function not in ("upper", "lower") or chunks is None or chunks >= LEAST_CHUNKS:
            return None
        return f"{self.function}() needs {LEAST_CHUNKS} chunks of text at least, there are {chunks}: give more text"

    def margin(self, value: float) -> float:
        """How far inside the limit: negative outside."""
        return self.limit - value if self.operator in ("<", "<=") else value - self.limit

    def holds(self, value: float) -> bool:
        """Whether a value satisfies it."""
        margin = self.margin(value)
        return margin >= 0 if self.operator.endswith("=") else margin > 0


def rules_of(
    conditions: Sequence[str],
    with_baseline: bool = False,
    thresholds: str | os.PathLike[str] | None = None,
    strict_warnings: bool = False,
) -> list[Rule]:
    """Rules of a thresholds file, then those that are given; with a baseline and without any, :data:`NO_WORSE`.

    Raises:
        UsageError: none, or of a number that an evaluation does not have, or of a baseline that is not given; a file
            that holds anything else.
    """
    rules = [] if thresholds is None else _of_file(thresholds)
    rules += [_rule(text) for text in conditions]
    if not rules and with_baseline:
        rules = [_rule(NO_WORSE)]
    if strict_warnings:
        rules = [rule._replace(severity="error") for rule in rules]
    for rule in rules:
        if rule.function in OF_BASELINE and not with_baseline:
            raise UsageError(f'"{display(rule.text)}": needs --baseline, an earlier evaluation')
    return rules


def _of_file(thresholds: str | os.PathLike[str]) -> list[Rule]:
    name = display(os.fspath(thresholds))
    try:
        tables = rule_tables(thresholds, name, KEYS)
    except FileNotFoundError as error:
        raise UsageError(f"{name}: no such file") from error
    if not tables:
        raise UsageError(f"{name}: has no [[rule]]")
    return [_of_table(table) for table in tables]


def _of_table(table: Table) -> Rule:
    fields = table.fields
    try:
        rule = _rule(fields["require"])
    except UsageError as error:
        raise UsageError(f"{table.where}: require: {error}") from error
    return rule._replace(id=fields["id"], severity=fields.get("severity", "error"), reason=fields.get("reason"))


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise UsageError(f'"{display(text)}" is no rule of an evaluation; write one such as "kld_mean <= 0.01"')
    metric = found["inner"] or found["metric"]
    if metric not in METRICS:
        near = get_close_matches(metric, METRICS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METRICS)}"
        raise UsageError(f'"{display(text)}": an evaluation has no {display(metric)}; {hint}')
    function = found["function"]
    if function in ("upper", "lower") and f"{metric}_se" not in METRICS:
        raise UsageError(f'"{display(text)}": {metric} has no standard error; write it without {function}()')
    return Rule(text.strip(), text.strip(), metric, function, found["operator"], float(found["limit"]))


def judged(evaluation: Evaluation, rules: Sequence[Rule], baseline: Evaluation | None = None) -> Evaluation:
    """The evaluation with its candidates judged; one that is inconclusive stays so.

    Raises:
        UsageError: the baseline is of other tokens, or its candidates cannot be told which is which.
    """
    if not rules:
        return evaluation
    if baseline is not None and (why := difference(baseline, evaluation)):
        raise UsageError(f"--baseline: {why}")
    candidates = [_judged(candidate, rules, _before(candidate, baseline)) for candidate in evaluation.candidates]
    verdict, reasons = overall(candidates)
    return evaluation.model_copy(update={"candidates": candidates, "verdict": verdict, "reasons": reasons})


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


def _before(candidate: Evaluated, baseline: Evaluation | None) -> Evaluated | None:
    """The candidate of the baseline that this one is held against."""
    if baseline is None:
        return None
    if len(baseline.candidates) == 1:
        return baseline.candidates[0]
    found = next((before for before in baseline.candidates if before.name == candidate.name), None)
    if found is None:
        names = ", ".join(display(before.name) for before in baseline.candidates)
        raise UsageError(f"--baseline: has no candidate named {display(candidate.name)}; it has {names}")
    return found


def _judged(candidate: Evaluated, rules: Sequence[Rule], before: Evaluated | None) -> Evaluated:
    gates = [_gate(rule, candidate, before) for rule in rules]
    failed = [gate.message for gate in gates if gate.status == "fail" and gate.severity == "error"]
    verdict, reasons = candidate.verdict, candidate.reasons
    unjudged = [found.message for found in candidate.findings if found.code in ANOTHER_MODEL]
    unjudged += [gate.message for gate, rule in zip(gates, rules, strict=True) if rule.unjudgeable(candidate)]
    if unjudged:
        reasons = [*(reasons if verdict == "inconclusive" else ()), *unjudged]
        verdict = "inconclusive"
    if verdict != "inconclusive":
        verdict = "fail" if failed else "pass"
        warned = [gate.message for gate in gates if gate.status == "fail"]
        reasons = failed or warned or ["all gates hold"]
    values = {name: getattr(candidate, name) for name in candidate.__dataclass_fields__}
    return Evaluated(**values | {"verdict": verdict, "reasons": reasons, "gates": gates})


def _gate(rule: Rule, candidate: Evaluated, before: Evaluated | None) -> Gate:
    value = rule.observed(candidate, before)
    unjudged = rule.unjudgeable(candidate)
    why = unjudged or (None if value is not None else "undefined")
    holds = value is not None and unjudged is None and rule.holds(value)
    margin = None if value is None else rule.margin(value)
    shown = "undefined" if value is None else decisive(value, rule.limit)
    name = rule.text if rule.id == rule.text else f"{display(rule.id)}: {rule.text}"
    message = f"gate {name} {'holds' if holds else 'does not hold'}: {shown}"
    if unjudged:
        message = f"gate {name} cannot be judged: {unjudged}"
    return Gate(
        id=rule.id,
        require=rule.text,
        layers=[],
        severity=rule.severity,
        reason=rule.reason,
        status="pass" if holds else "fail",
        judged=0,
        identical=0,
        skipped=0,
        observed=value,
        limit=rule.limit,
        margin=margin,
        worst_layer=None,
        violations=[] if holds else [Violation(None, value, margin, why)],
        message=message,
    )
