"""Rules against a subject: which holds, by how much, and what stands against it.

A rule holds only if it was judged: on something (an empty selection fails), on a complete report, and without
a layer that no number can be trusted of (not compared, not finite, a finding of severity error). No rule is
judged on the original itself, nor on a quantized checkpoint in its place. Values are
never rounded.
"""

from collections.abc import Callable
from math import inf, isfinite, isinf, isnan
from typing import NamedTuple

from quanterr.gates.expression import OF_BASELINE, OF_INTERVAL, Condition
from quanterr.gates.rules import Rule
from quanterr.gates.selecting import check_patterns, dead_pattern, decider, selector
from quanterr.report import NORM
from quanterr.report.gate_results import Gate, Verdict, Violation
from quanterr.report.subjects import WIDTH, Item, Subject, compute_change
from quanterr.util.text import count, decisive, display


def needed(rules: list[Rule]) -> tuple[set[str], set[str]]:
    """The metrics of layers and of the aggregate that the rules, and the check of a baseline, look at."""
    metrics = {rule.condition.metric for rule in rules if rule.condition.of_items} | {NORM}
    return metrics, {rule.condition.metric for rule in rules if rule.condition.scope == "model"}


def judge_subject(subject: Subject, rules: list[Rule], baseline: Subject | None = None) -> Verdict:
    """The verdict of rules on a subject; ``baseline`` is what delta(), rel_delta() and ratio() compare with.

    Raises:
        UsageError: the baseline says nothing about this subject, or a pattern of a rule selects nothing of it.
    """
    if baseline:
        compared = {rule.condition.metric for rule in rules if rule.condition.function in OF_BASELINE}
        subject.check_baseline(baseline, compared)
    if not subject.unreliable:  # which weighs more, and may be why there is no such layer
        check_patterns(rules, subject)
    gates = [_judged(subject, rules, n, baseline) for n in range(len(rules))]
    doubts = unreliable(subject, rules)
    doubts += [gate.message for gate, rule in zip(gates, rules, strict=True) if _too_few(subject, rule.condition)]
    failed = [gate for gate in gates if gate.status == "fail" and gate.message not in doubts]
    errors = [gate.message for gate in failed if gate.severity == "error"]
    reasons = doubts + errors
    if not reasons:
        warned = f"; {count(len(failed), 'gate')} with a warning does not hold" if failed else ""
        reasons = [f"{subject.vocabulary.done}; {_hold(len(gates) - len(failed))}{warned}"]
    return Verdict("inconclusive" if doubts else "fail" if errors else "pass", reasons, gates)


def unreliable(subject: Subject, rules: list[Rule]) -> list[str]:
    """Why the verdict is inconclusive, whichever rules hold.

    Besides what makes the comparison unreliable: rules mean nothing where what was measured is not the quantized
    model.
    """
    return list(subject.unreliable or (subject.unquantized if rules else ()))


def _too_few(subject: Subject, condition: Condition) -> str | None:
    """Why there is no interval that a condition asks for."""
    return (
        f"{condition.function}() {subject.too_few}" if condition.function in OF_INTERVAL and subject.too_few else None
    )


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
    unjudged: bool = False


class Numbers(NamedTuple):
    """The values of layers, and those without one: violations unless the rule skips what is undefined."""

    known: list[tuple[Item, float]]
    missing: list[Violation]
    skipped: list[Violation]


def _judged(subject: Subject, rules: list[Rule], n: int, baseline: Subject | None) -> Gate:
    rule, condition = rules[n], rules[n].condition
    if not subject.complete:
        outcome = _so_far(subject, rules, n, baseline) or _nothing("the report is incomplete: the run was interrupted")
    elif why := _too_few(subject, condition):
        outcome = _nothing(why)._replace(unjudged=True)
    elif condition.scope == "whole":
        outcome = _of_whole(condition, _whole(condition, subject, baseline))
    elif condition.scope == "model":
        outcome = _nothing(subject.trouble) if subject.trouble else _of_model(condition, subject)
    else:
        outcome = _of_items(subject, rules, n, baseline)
    return _gate(rule, outcome)


def _whole(condition: Condition, subject: Subject, baseline: Subject | None) -> float | None:
    """What a function makes of a number of the subject itself."""
    value = subject.get_whole_metric(condition.metric)
    if condition.function in OF_INTERVAL:
        error = subject.errors.get(condition.metric)
        sign = 1 if condition.function == "upper" else -1
        return None if value is None or error is None else value + sign * WIDTH * error
    if condition.function not in OF_BASELINE:
        return value
    old = baseline.get_whole_metric(condition.metric) if baseline else None
    return compute_change(old, value, condition.function)


def _so_far(subject: Subject, rules: list[Rule], n: int, baseline: Subject | None) -> _Outcome | None:
    """What layers of an interrupted run already violate: no later one can correct it."""
    if not rules[n].condition.per_item:
        return None
    outcome = _of_items(subject, rules, n, baseline)
    beyond = [violation for violation in outcome.violations if violation.observed is not None]
    if not beyond:
        return None
    return outcome._replace(violations=beyond, observed=beyond[0].observed, worst_layer=beyond[0].layer)


def _nothing(reason: str) -> _Outcome:
    return _Outcome([Violation(None, None, None, reason)])


def _of_model(condition: Condition, subject: Subject) -> _Outcome:
    """A number of the aggregate: infinite only where no layer differs."""
    value = subject.get_model_metric(condition.metric)
    if value is not None and isinf(value) and any(item.kind == "layers" for item in subject.items):
        return _nothing(f"{condition.metric} is {value}")
    return _of_whole(condition, value)


def _of_whole(condition: Condition, value: float | None) -> _Outcome:
    """One number for all."""
    if value is None or isnan(value):
        return _nothing(f"{condition.metric} is undefined")
    violations = [] if condition.holds(value) else [_violation(condition, None, value)]
    return _Outcome(violations, value)


def _of_items(subject: Subject, rules: list[Rule], n: int, baseline: Subject | None) -> _Outcome:
    rule, condition = rules[n], rules[n].condition
    if dead := dead_pattern(rule, subject):
        return _nothing(dead)
    takes = decider(rules, n)
    every = subject.list_items(condition.metric)
    items = [item for item in every if takes(item)]
    if not items:
        selected = any(map(selector(rule), every))
        return _nothing(
            f"later rules of the same id decide for all its {condition.item}s"
            if selected
            else f"there is no {condition.item} to judge"
        )
    before = {item.name: item for item in baseline.list_items(condition.metric)} if baseline else {}
    numbers = numbers_of(items, rule, before)
    gone = _gone(every, before, takes) if condition.function in OF_BASELINE else []
    numbers.missing.extend(gone)
    differ = not all(item.identical for item in items)
    if differ and not numbers.missing and all(item.identical for item, _ in numbers.known):
        outcome = _nothing(f"no selected {condition.item} that differs has {condition.metric}")
    else:
        outcome = _each(condition, numbers, before) if condition.per_item else _together(condition, numbers)
    return outcome._replace(
        judged=len(items) + len(gone),
        identical=sum(item.identical for item in items),
        skipped=len(numbers.skipped),
    )


def _gone(items: list[Item], before: dict[str, Item], takes: Callable[[Item], bool]) -> list[Violation]:
    """Layers of the baseline that are no longer there: as bad as a layer that got worse."""
    here = {item.name for item in items}
    gone = [w for w in before.values() if w.name not in here and w.kind != "not_compared" and takes(w)]
    return [Violation(item.name, None, None, "is in the baseline but not in this report") for item in gone]


def numbers_of(items: list[Item], rule: Rule, before: dict[str, Item]) -> Numbers:
    """The values of layers that a rule looks at; ``before`` are those of the baseline by name."""
    found = Numbers([], [], [])
    badness: dict[str, float] = {}
    metric, function = rule.condition.metric, rule.condition.function
    for item in items:
        value = item.get_number(metric)
        trouble, undefined = item.trouble or _infinite(item, metric, value), f"{metric} is undefined"
        skips = rule.undefined == "skip"
        if function in OF_BASELINE:
            old = before.get(item.name)
            trouble = trouble or _untrusted(old)
            value = compute_change(old.get_number(metric), value, function) if old else None
            undefined = undefined if old else "is not in the baseline"
            skips = skips and old is None  # of one that is there, no number may mean that it got worse
        if trouble is None and value is not None and not isnan(value):
            found.known.append((item, value))
        else:
            to = found.skipped if skips and trouble is None else found.missing
            to.append(Violation(item.name, None, None, trouble or undefined))
            if value is not None and isfinite(value):
                badness[item.name] = rule.condition.margin(value)
    found.missing.sort(key=lambda violation: badness.get(violation.layer or "", -inf))
    return found


def _infinite(item: Item, metric: str, value: float | None) -> str | None:
    """An infinite number, null in the report, says that something is broken, whatever the limit; it is not skipped."""
    return None if value is None or not isinf(value) or item.identical else f"{metric} is {value}"


def _untrusted(old: Item | None) -> str | None:
    """Why nothing compares with a layer of the baseline. It is not skipped, as one that is new is: it may be worse."""
    if old is None or old.trouble is None:
        return None
    return f"{'was not compared' if old.kind == 'not_compared' else 'cannot be relied on'} in the baseline"


def _each(condition: Condition, numbers: Numbers, before: dict[str, Item]) -> _Outcome:
    """Every layer by itself."""
    beyond = [
        _violation(condition, item.name, value, before.get(item.name))
        for item, value in numbers.known
        if not condition.holds(value)
    ]
    beyond.sort(key=lambda violation: (violation.margin is not None, violation.margin))
    if violations := numbers.missing + beyond:
        return _Outcome(violations, violations[0].observed, violations[0].layer)
    if not numbers.known:
        return _nothing(f"no selected {condition.item} has {condition.metric}")
    item, value = min(numbers.known, key=lambda item: condition.margin(item[1]))
    return _Outcome([], value, item.name)


def _together(condition: Condition, numbers: Numbers) -> _Outcome:
    """All layers together. Those that are the same on both sides would flatter: they count if there are no others.

    What they cost (bits per item) counts always: it is not perfect for being the same.
    """
    if numbers.missing:
        return _Outcome(numbers.missing, worst_layer=numbers.missing[0].layer)
    known = [v for item, v in numbers.known if not item.identical or condition.metric not in item.perfect]
    known = known or [value for _, value in numbers.known]
    if not known:
        return _nothing(f"no selected {condition.item} has {condition.metric}")
    if condition.inner:
        return _of_whole(condition, sum(map(condition.inner.holds, known)) / len(known))
    return _of_whole(condition, condition.statistic(known))


def _violation(condition: Condition, layer: str | None, value: float, old: Item | None = None) -> Violation:
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
    if outcome.unjudged:
        return f"gate {label(rule)} cannot be judged: {_against(rule, outcome)}"
    if outcome.violations:
        return f"gate {label(rule)} does not hold: {_against(rule, outcome)}"
    return f"gate {label(rule)} holds: {_for(rule, outcome)}"


def _against(rule: Rule, outcome: _Outcome) -> str:
    first = outcome.violations[0]
    words = display(first.reason or "", 2000) if first.observed is None else value_text(rule, first.observed)
    if first.layer is None:
        return f"{words}{_over(rule, outcome)}"
    return f"{len(outcome.violations):,} of {_items(rule, outcome)}, the worst {display(first.layer)}: {words}"


def _for(rule: Rule, outcome: _Outcome) -> str:
    if outcome.judged and outcome.judged == outcome.identical:
        return f"{count(outcome.judged, rule.condition.item)}{_skipped(outcome)}, the same on both sides"
    words = f"no {rule.condition.item} differs" if outcome.observed is None else value_text(rule, outcome.observed)
    if outcome.worst_layer is None:
        return f"{words}{_over(rule, outcome)}"
    return f"{_items(rule, outcome)}, the nearest {display(outcome.worst_layer)}: {words}"


def _items(rule: Rule, outcome: _Outcome) -> str:
    identical = f" ({outcome.identical:,} identical)" if outcome.identical else ""
    return count(outcome.judged, rule.condition.item) + identical + _skipped(outcome)


def _skipped(outcome: _Outcome) -> str:
    return f", {outcome.skipped:,} of them skipped" if outcome.skipped else ""


def _over(rule: Rule, outcome: _Outcome) -> str:
    return f" over {_items(rule, outcome)}" if outcome.judged else ""


def value_text(rule: Rule, value: float) -> str:
    """A value and its margin, with as many digits as it takes to see on which side of the limit it is."""
    margin = _margin(rule.condition, value)
    shown = decisive(value, rule.condition.limit)
    return shown + ("" if margin is None else f" (margin {decisive(margin, 0)})")
