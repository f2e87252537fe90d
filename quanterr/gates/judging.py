"""Rules against a report: which holds, by how much, and what stands against it.

A rule holds only if it was judged: on something (an empty selection fails), on a complete report, and without
a layer that no number can be trusted of (not compared, not finite, a finding of severity error). No rule is
judged on the original itself, nor on a quantized checkpoint in its place. Values are
never rounded.
"""

from collections.abc import Callable
from math import inf, isfinite, isinf, isnan
from typing import TYPE_CHECKING, Literal, NamedTuple

from quanterr.gates.expression import OF_BASELINE, Condition
from quanterr.gates.rules import Rule
from quanterr.gates.selecting import check_patterns, dead_pattern, decider, selector
from quanterr.report import NORM
from quanterr.report.gate_results import Gate, Violation
from quanterr.report.same_original import change, check_baseline
from quanterr.report.values import Values, Weight
from quanterr.util.text import count, decisive, display

if TYPE_CHECKING:
    pass

NOT_QUANTIZED = ("identical", "swapped_sides")  # findings


class Verdict(NamedTuple):
    """What comes out for the whole report."""

    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str]
    gates: list[Gate]


def needed(rules: list[Rule]) -> tuple[set[str], set[str]]:
    """The metrics of layers and of the aggregate that the rules, and the check of a baseline, look at."""
    metrics = {rule.condition.metric for rule in rules if rule.condition.of_layers} | {NORM}
    return metrics, {rule.condition.metric for rule in rules if rule.condition.function == "global"}


def judge_values(values: Values, rules: list[Rule], baseline: Values | None = None) -> Verdict:
    """Judge a report by rules; ``baseline`` is what delta() and rel_delta() compare with.

    Raises:
        UsageError: the baseline says nothing about this report, or a pattern of a rule selects nothing of it.
    """
    if baseline:
        compared = {rule.condition.metric for rule in rules if rule.condition.function in OF_BASELINE}
        check_baseline(baseline, values, compared)
    if not values.unreliable:  # which weighs more, and may be why there is no such layer
        check_patterns(rules, values)
    doubts = unreliable(values, rules)
    gates = [_judged(values, rules, n, baseline) for n in range(len(rules))]
    failed = [gate for gate in gates if gate.status == "fail"]
    errors = [gate.message for gate in failed if gate.severity == "error"]
    reasons = doubts + errors
    if not reasons:
        warned = f"; {count(len(failed), 'gate')} with a warning does not hold" if failed else ""
        reasons = [f"everything selected was compared; {_hold(len(gates) - len(failed))}{warned}"]
    return Verdict("inconclusive" if doubts else "fail" if errors else "pass", reasons, gates)


def unreliable(values: Values, rules: list[Rule]) -> list[str]:
    """Why the verdict is inconclusive, whichever rules hold.

    Besides what makes the comparison unreliable: rules mean nothing for the original against itself, nor with the
    sides swapped.
    """
    if values.unreliable or not rules:
        return values.unreliable
    warnings = [found for found in values.report["findings"] if found["severity"] == "warning"]
    return [found["message"] for found in warnings if found["code"] in NOT_QUANTIZED]


def _hold(n: int) -> str:
    return "the gate holds" if n == 1 else f"{n} gates hold"


class _Outcome(NamedTuple):
    """What came of a rule. ``observed`` may be infinite; it is None where there is not a number."""

    violations: list[Violation]
    observed: float | None = None
    worst_layer: str | None = None
    judged: int = 0
    identical: int = 0
    skipped: int = 0


class Numbers(NamedTuple):
    """The values of layers, and those without one: violations unless the rule skips what is undefined."""

    known: list[tuple[Weight, float]]
    missing: list[Violation]
    skipped: list[Violation]


def _judged(values: Values, rules: list[Rule], n: int, baseline: Values | None) -> Gate:
    rule, condition = rules[n], rules[n].condition
    if not values.report["complete"]:
        outcome = _so_far(values, rules, n, baseline) or _nothing("the report is incomplete: the run was interrupted")
    elif condition.function == "report":
        outcome = _of_whole(condition, values.of_report(condition.metric))
    elif condition.function == "global":
        number = values.of_model(condition.metric)
        outcome = _nothing(values.trouble) if values.trouble else _of_model(condition, number, values)
    else:
        outcome = _of_layers(values, rules, n, baseline)
    return _gate(rule, outcome)


def _so_far(values: Values, rules: list[Rule], n: int, baseline: Values | None) -> _Outcome | None:
    """What layers of an interrupted run already violate: no later one can correct it."""
    if not rules[n].condition.per_layer:
        return None
    outcome = _of_layers(values, rules, n, baseline)
    beyond = [violation for violation in outcome.violations if violation.observed is not None]
    if not beyond:
        return None
    return outcome._replace(violations=beyond, observed=beyond[0].observed, worst_layer=beyond[0].layer)


def _nothing(reason: str) -> _Outcome:
    return _Outcome([Violation(None, None, None, reason)])


def _of_model(condition: Condition, value: float | None, values: Values) -> _Outcome:
    """A number of the aggregate: infinite only where no layer differs."""
    if value is not None and isinf(value) and values.report["layers"]:
        return _nothing(f"{condition.metric} is {value}")
    return _of_whole(condition, value)


def _of_whole(condition: Condition, value: float | None) -> _Outcome:
    """One number for all."""
    if value is None or isnan(value):
        return _nothing(f"{condition.metric} is undefined")
    violations = [] if condition.holds(value) else [_violation(condition, None, value)]
    return _Outcome(violations, value)


def _of_layers(values: Values, rules: list[Rule], n: int, baseline: Values | None) -> _Outcome:
    rule, condition = rules[n], rules[n].condition
    if dead := dead_pattern(rule, values):
        return _nothing(dead)
    takes = decider(rules, n)
    weights = [weight for weight in values.weights if takes(weight)]
    if not weights:
        selected = any(map(selector(rule), values.weights))
        return _nothing(
            "later rules of the same id decide for all its layers" if selected else "there is no layer to judge"
        )
    before = {weight.name: weight for weight in baseline.weights} if baseline else {}
    numbers = numbers_of(weights, rule, before)
    gone = _gone(values, before, takes) if condition.function in OF_BASELINE else []
    numbers.missing.extend(gone)
    differ = any(weight.kind != "lossless" for weight in weights)
    if differ and not numbers.missing and all(weight.kind == "lossless" for weight, _ in numbers.known):
        outcome = _nothing(f"no selected layer that differs has {condition.metric}")
    else:
        outcome = _each(condition, numbers, before) if condition.per_layer else _together(condition, numbers)
    return outcome._replace(
        judged=len(weights) + len(gone),
        identical=sum(weight.kind == "lossless" for weight in weights),
        skipped=len(numbers.skipped),
    )


def _gone(values: Values, before: dict[str, Weight], takes: Callable[[Weight], bool]) -> list[Violation]:
    """Layers of the baseline that are no longer there: as bad as a layer that got worse."""
    here = {weight.name for weight in values.weights}
    gone = [w for w in before.values() if w.name not in here and w.kind != "not_compared" and takes(w)]
    return [Violation(weight.name, None, None, "is in the baseline but not in this report") for weight in gone]


def numbers_of(weights: list[Weight], rule: Rule, before: dict[str, Weight]) -> Numbers:
    """The values of layers that a rule looks at; ``before`` are those of the baseline by name."""
    found = Numbers([], [], [])
    badness: dict[str, float] = {}
    metric, function = rule.condition.metric, rule.condition.function
    for weight in weights:
        value = weight.number(metric)
        trouble, undefined = weight.trouble or _infinite(weight, metric, value), f"{metric} is undefined"
        skips = rule.undefined == "skip"
        if function in OF_BASELINE:
            old = before.get(weight.name)
            trouble = trouble or _untrusted(old)
            value = change(old.number(metric), value, function == "rel_delta") if old else None
            undefined = undefined if old else "is not in the baseline"
            skips = skips and old is None  # of one that is there, no number may mean that it got worse
        if trouble is None and value is not None and not isnan(value):
            found.known.append((weight, value))
        else:
            to = found.skipped if skips and trouble is None else found.missing
            to.append(Violation(weight.name, None, None, trouble or undefined))
            if value is not None and isfinite(value):
                badness[weight.name] = rule.condition.margin(value)
    found.missing.sort(key=lambda violation: badness.get(violation.layer or "", -inf))
    return found


def _infinite(weight: Weight, metric: str, value: float | None) -> str | None:
    """An infinite number, null in the report, says that something is broken, whatever the limit; it is not skipped."""
    return None if value is None or not isinf(value) or weight.kind == "lossless" else f"{metric} is {value}"


def _untrusted(old: Weight | None) -> str | None:
    """Why nothing compares with a layer of the baseline. It is not skipped, as one that is new is: it may be worse."""
    if old is None or old.trouble is None:
        return None
    return f"{'was not compared' if old.kind == 'not_compared' else 'cannot be relied on'} in the baseline"


def _each(condition: Condition, numbers: Numbers, before: dict[str, Weight]) -> _Outcome:
    """Every layer by itself."""
    beyond = [
        _violation(condition, weight.name, value, before.get(weight.name))
        for weight, value in numbers.known
        if not condition.holds(value)
    ]
    beyond.sort(key=lambda violation: (violation.margin is not None, violation.margin))
    if violations := numbers.missing + beyond:
        return _Outcome(violations, violations[0].observed, violations[0].layer)
    if not numbers.known:
        return _nothing(f"no selected layer has {condition.metric}")
    weight, value = min(numbers.known, key=lambda item: condition.margin(item[1]))
    return _Outcome([], value, weight.name)


def _together(condition: Condition, numbers: Numbers) -> _Outcome:
    """All layers together. Those that are the same on both sides would flatter: they count if there are no others.

    What they cost (bits per weight) counts always: it is not perfect for being the same.
    """
    if numbers.missing:
        return _Outcome(numbers.missing, worst_layer=numbers.missing[0].layer)
    known = [v for weight, v in numbers.known if weight.kind != "lossless" or condition.metric not in weight.perfect]
    known = known or [value for _, value in numbers.known]
    if not known:
        return _nothing(f"no selected layer has {condition.metric}")
    if condition.inner:
        return _of_whole(condition, sum(map(condition.inner.holds, known)) / len(known))
    return _of_whole(condition, condition.statistic(known))


def _violation(condition: Condition, layer: str | None, value: float, old: Weight | None = None) -> Violation:
    """``old`` is the same layer in the baseline."""
    if isfinite(value):
        return Violation(layer, value, _margin(condition, value), None)
    if condition.function not in OF_BASELINE:
        return Violation(layer, None, None, f"{condition.metric} is {value}")
    was = "; it was the same on both sides in the baseline" if old and old.kind == "lossless" else ""
    return Violation(layer, None, None, f"{condition.function}({condition.metric}) is {value}{was}")


def _margin(condition: Condition, value: float) -> float | None:
    """None where it is too large for a number."""
    margin = condition.margin(value)
    return margin if isfinite(margin) else None


def _gate(rule: Rule, outcome: _Outcome) -> Gate:
    observed = outcome.observed if outcome.observed is not None and isfinite(outcome.observed) else None
    return Gate(
        id=rule.id,
        require=rule.condition.text,
        layers=list(rule.layers),
        severity=rule.severity,
        reason=rule.reason,
        status="fail" if outcome.violations else "pass",
        judged=outcome.judged,
        identical=outcome.identical,
        skipped=outcome.skipped,
        observed=observed,
        limit=rule.condition.limit,
        margin=None if observed is None else _margin(rule.condition, observed),
        worst_layer=outcome.worst_layer,
        message=_message(rule, outcome),
        violations=outcome.violations,
    )


def label(rule: Rule) -> str:
    """What a rule is called: its id and its condition."""
    text = display(rule.condition.text)
    return text if rule.id == rule.condition.text else f"{display(rule.id)}: {text}"


def _message(rule: Rule, outcome: _Outcome) -> str:
    if outcome.violations:
        return f"gate {label(rule)} does not hold: {_against(rule, outcome)}"
    return f"gate {label(rule)} holds: {_for(rule, outcome)}"


def _against(rule: Rule, outcome: _Outcome) -> str:
    first = outcome.violations[0]
    words = display(first.reason or "", 2000) if first.observed is None else value_text(rule, first.observed)
    if first.layer is None:
        return f"{words}{_over(outcome)}"
    return f"{len(outcome.violations):,} of {_layers(outcome)}, the worst {display(first.layer)}: {words}"


def _for(rule: Rule, outcome: _Outcome) -> str:
    if outcome.judged and outcome.judged == outcome.identical:
        return f"{count(outcome.judged, 'layer')}{_skipped(outcome)}, the same on both sides"
    words = "no layer differs" if outcome.observed is None else value_text(rule, outcome.observed)
    if outcome.worst_layer is None:
        return f"{words}{_over(outcome)}"
    return f"{_layers(outcome)}, the nearest {display(outcome.worst_layer)}: {words}"


def _layers(outcome: _Outcome) -> str:
    identical = f" ({outcome.identical:,} identical)" if outcome.identical else ""
    return count(outcome.judged, "layer") + identical + _skipped(outcome)


def _skipped(outcome: _Outcome) -> str:
    return f", {outcome.skipped:,} of them skipped" if outcome.skipped else ""


def _over(outcome: _Outcome) -> str:
    return f" over {_layers(outcome)}" if outcome.judged else ""


def value_text(rule: Rule, value: float) -> str:
    """A value and its margin, with as many digits as it takes to see on which side of the limit it is."""
    margin = _margin(rule.condition, value)
    shown = decisive(value, rule.condition.limit)
    return shown + ("" if margin is None else f" (margin {decisive(margin, 0)})")
