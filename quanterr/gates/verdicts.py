"""The application of rules to a subject: which rules hold, by how much, and which layers violate them.

A rule holds only if it could be judged: on at least one item, on a complete report, and without a layer whose numbers
cannot be trusted (not compared, not finite, with a finding of severity error). The verdict is inconclusive if the
quantized checkpoint is a copy of the original, or if the sides are swapped. Values are never rounded.
"""

from collections.abc import Callable, Collection
from math import inf, isfinite, isinf, isnan
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.documents.comparison import NORM
from quanterr.documents.gate_results import BECAUSE, Gate, Reason, Verdict, Violation, Word, store_reasons
from quanterr.documents.subjects import HALF_WIDTH, Item, Subject, compute_change
from quanterr.gates.expression import BASELINE_FUNCTIONS, INTERVAL_FUNCTIONS, OPERATORS, Condition
from quanterr.gates.rules import Rule
from quanterr.gates.selectors import check_patterns, explain_dead_pattern, make_decider, make_selector
from quanterr.gates.waivers import find_waived
from quanterr.util.text import count, display, format_decisive

MAX_LISTED_WAIVED = 3  # maximum number of waived findings that the reason of a pass names


def list_needed_metrics(rules: list[Rule], compared: bool = False) -> set[str]:
    """Return the metrics of layers that the rules need, and that the check of a baseline needs if ``compared``."""
    return {rule.condition.metric for rule in rules if rule.condition.of_items} | ({NORM} if compared else set())


def judge_subject(subject: Subject, rules: list[Rule], baseline: Subject | None = None) -> Verdict:
    """Return the verdict on a subject; delta(), rel_delta() and ratio() compare it with ``baseline``.

    Raises:
        UsageError: the baseline does not fit this subject, or a pattern of a rule selects nothing.
    """
    other_original = None
    if baseline:
        comparing = [rule for rule in rules if rule.condition.function in BASELINE_FUNCTIONS]
        any_original = all(rule.baseline_original == "any" for rule in comparing)
        metrics = {rule.condition.metric for rule in comparing}
        other_original = subject.check_baseline(baseline, metrics, any_original, rules[0].among)
    if not subject.unreliable:  # an unreliable report is inconclusive anyway, and may lack layers
        check_patterns(rules, subject)
    gates = [_apply_rule(subject, rules, n, baseline) for n in range(len(rules))]
    if other_original:
        gates = [
            replace(gate, baseline_original=other_original) if rule.condition.function in BASELINE_FUNCTIONS else gate
            for gate, rule in zip(gates, rules, strict=True)
        ]
    unjudged = [
        gate for gate, rule in zip(gates, rules, strict=True) if _explain_missing_interval(subject, rule.condition)
    ]
    doubts = list_doubts(subject, rules) + [Reason(gate.message, "gate") for gate in unjudged]
    failed = [gate for gate in gates if gate.status == "fail" and not (gate.is_unjudged and doubts)]
    errors = [Reason(gate.message, "gate") for gate in failed if gate.severity == "error"]
    reasons = doubts + errors
    if not reasons:
        warned = f"; failed with a warning: {count(len(failed), 'gate')}" if failed else ""
        held = len(gates) - len(failed)
        hold = "the gate holds" if held == len(gates) == 1 else f"{held} gate{' holds' if held == 1 else 's hold'}"
        beside = "; the baseline has another original" if other_original else ""
        excused = sum(len(gate.waived) for gate in gates)
        beside += f"; {count(excused, 'failure')} of gates waived" if excused else ""
        beside += f"; waived: {', '.join(subject.waived[:MAX_LISTED_WAIVED])}" if subject.waived else ""
        beside += (
            f" and {len(subject.waived) - MAX_LISTED_WAIVED:,} more" if len(subject.waived) > MAX_LISTED_WAIVED else ""
        )
        reasons = [Reason(f"{subject.vocabulary.done}; {hold}{warned}{beside}", "result")]
    verdict: Word = "inconclusive" if doubts else "fail" if errors else "pass"
    return Verdict(verdict, gates=gates, **store_reasons(reasons))


def list_doubts(subject: Subject, rules: list[Rule]) -> list[Reason]:
    """Return the reasons for an inconclusive verdict that do not depend on which rules hold.

    Such reasons are an unreliable comparison and, if there are rules, a measured model that is not quantized.
    """
    return list(subject.unreliable or (subject.unquantized if rules else ()))


def _explain_missing_interval(subject: Subject, condition: Condition) -> str | None:
    """Return why the interval that a condition needs does not exist; None if it does."""
    return (
        f"{condition.function}() {subject.too_few}"
        if condition.function in INTERVAL_FUNCTIONS and subject.too_few
        else None
    )


class _Outcome(NamedTuple):
    """Result of a rule.

    ``observed`` may be infinite; it is None if there is no number.
    """

    violations: list[Violation]
    observed: float | None = None
    worst_layer: str | None = None
    judged: int = 0
    identical: int = 0
    skipped: int = 0
    unjudged: bool = False


class ItemValues(NamedTuple):
    """Items with their values, and items without a value: violations, unless the rule skips undefined values."""

    known: list[tuple[Item, float]]
    missing: list[Violation]
    skipped: list[Violation]


def _apply_rule(subject: Subject, rules: list[Rule], n: int, baseline: Subject | None) -> Gate:
    """Judge a rule, and once more without the layers that are waived, if it does not hold."""
    rule = rules[n]
    outcome = _find_outcome(subject, rules, n, baseline)
    waived = [] if outcome.unjudged else find_waived(rule.waivers, rule.id, outcome.violations)
    names = {violation.layer for violation in waived}
    if None in names:
        outcome = outcome._replace(violations=[])
    elif names:
        outcome = _find_outcome(subject, rules, n, baseline, names)
    violations = [
        violation
        if violation.observed is None
        else replace(violation, reason=subject.find_cause(rule.condition.metric, violation.layer))
        for violation in outcome.violations
    ]
    gate = _make_gate(rule, outcome._replace(violations=violations))
    if not waived:
        return gate
    return replace(gate, waived=tuple(waived), message=f"{gate.message}; {len(waived):,} waived")


def _find_outcome(
    subject: Subject, rules: list[Rule], n: int, baseline: Subject | None, without: Collection[str | None] = ()
) -> _Outcome:
    condition = rules[n].condition
    if not subject.complete:
        interrupted = _fail_without_value("the report is incomplete: the run was interrupted")
        return _judge_so_far(subject, rules, n, baseline, without) or interrupted._replace(unjudged=True)
    if why := _explain_missing_interval(subject, condition):
        return _fail_without_value(why)._replace(unjudged=True)
    if condition.scope == "loading":
        refusal = subject.find_refusal(condition.metric)
        return _Outcome([], 1.0) if refusal is None else _fail_without_value(refusal)
    if condition.scope == "whole":
        return _judge_value(condition, _compute_value_of_whole(condition, subject, baseline))
    if condition.scope == "model":
        return _fail_without_value(subject.trouble) if subject.trouble else _judge_model(condition, subject)
    return _judge_items(subject, rules, n, baseline, without)


def _compute_value_of_whole(condition: Condition, subject: Subject, baseline: Subject | None) -> float | None:
    """Return the value that a condition judges for the whole subject; None if undefined."""
    value = subject.whole.get(condition.metric)
    if condition.function in INTERVAL_FUNCTIONS:
        error = subject.errors.get(condition.metric)
        sign = 1 if condition.function == "upper" else -1
        return None if value is None or error is None else value + sign * HALF_WIDTH * error
    if condition.function not in BASELINE_FUNCTIONS:
        return value
    old = baseline.whole.get(condition.metric) if baseline else None
    return compute_change(old, value, condition.function)


def _judge_so_far(
    subject: Subject, rules: list[Rule], n: int, baseline: Subject | None, without: Collection[str | None]
) -> _Outcome | None:
    """Judge the compared layers of an interrupted run: their violations are final; None if there are none."""
    if not rules[n].condition.per_item:
        return None
    outcome = _judge_items(subject, rules, n, baseline, without)
    compared = {item.name for item in subject.items if item.kind != "not_compared"}
    final = [violation for violation in outcome.violations if violation.layer in compared]
    if not final:
        return None
    return outcome._replace(violations=final, observed=final[0].observed, worst_layer=final[0].layer)


def _fail_without_value(reason: str) -> _Outcome:
    return _Outcome([Violation(None, None, None, reason)])


def _judge_model(condition: Condition, subject: Subject) -> _Outcome:
    """Judge a number of the aggregate, which may be infinite only if no layer differs."""
    value = subject.get_model_metric(condition.metric)
    if value is not None and isinf(value) and any(item.kind == "layers" for item in subject.items):
        return _fail_without_value(f"{condition.metric} is {value}")
    return _judge_value(condition, value)


def _judge_value(condition: Condition, value: float | None) -> _Outcome:
    """Judge a single number."""
    if value is None or isnan(value):
        return _fail_without_value(f"{condition.metric} is undefined")
    violations = [] if condition.holds(value) else [_make_violation(condition, None, value)]
    return _Outcome(violations, value)


def _judge_items(
    subject: Subject, rules: list[Rule], n: int, baseline: Subject | None, without: Collection[str | None] = ()
) -> _Outcome:
    rule, condition = rules[n], rules[n].condition
    if dead := explain_dead_pattern(rule, subject):
        return _fail_without_value(dead)
    takes = make_decider(rules, n)
    all_items = subject.list_items(condition.metric)
    items = [item for item in all_items if takes(item) and item.name not in without]
    if not items and without:
        return _Outcome([])
    if not items:
        selected = any(map(make_selector(rule), all_items))
        return _fail_without_value(
            f"later rules with the same id decide for all {condition.item}s that it selects"
            if selected
            else f"there is no {condition.item} to judge"
        )
    before = {item.name: item for item in baseline.list_items(condition.metric)} if baseline else {}
    numbers = collect_values(items, rule, before)
    gone = _find_removed(all_items, before, takes) if condition.function in BASELINE_FUNCTIONS else []
    gone = [violation for violation in gone if violation.layer not in without]
    numbers.missing.extend(gone)
    identical = sum([item.identical for item in items])
    if identical < len(items) and not numbers.missing and all(item.identical for item, _ in numbers.known):
        outcome = _fail_without_value(f"no selected {condition.item} that differs has {condition.metric}")
    else:
        outcome = _judge_each(condition, numbers, before) if condition.per_item else _judge_together(condition, numbers)
    return outcome._replace(
        judged=len(items) + len(gone),
        identical=identical,
        skipped=len(numbers.skipped),
    )


def _find_removed(items: list[Item], before: dict[str, Item], takes: Callable[[Item], bool]) -> list[Violation]:
    """Return a violation for each layer of the baseline that is gone, which is as bad as a layer that got worse."""
    here = {item.name for item in items}
    gone = [w for w in before.values() if w.name not in here and w.kind != "not_compared" and takes(w)]
    return [Violation(item.name, None, None, "is in the baseline but not in this report") for item in gone]


def collect_values(items: list[Item], rule: Rule, before: dict[str, Item]) -> ItemValues:
    """Collect the values that a rule compares; ``before`` are the items of the baseline by name."""
    collected = ItemValues([], [], [])
    badness: dict[str, float] = {}
    metric, function = rule.condition.metric, rule.condition.function
    compares, without_value, may_skip = (
        function in BASELINE_FUNCTIONS,
        f"{metric} is undefined",
        rule.undefined == "skip",
    )
    for item in items:
        value, trouble = item.get_number(metric), item.trouble
        if trouble is None and value is not None and isinf(value) and not item.identical:
            trouble = f"{metric} is {value}"  # null in the report: something is broken, so it is never skipped
        undefined, skips = without_value, may_skip
        if compares:
            old = before.get(item.name)
            trouble = trouble or _distrust_baseline(old)
            value = compute_change(old.get_number(metric), value, function) if old else None
            undefined = undefined if old else "is not in the baseline"
            skips = skips and old is None  # a layer of the baseline without a number may have got worse
        if trouble is None and value is not None and not isnan(value):
            collected.known.append((item, value))
        else:
            to = collected.skipped if skips and trouble is None else collected.missing
            to.append(Violation(item.name, None, None, trouble or undefined))
            if value is not None and isfinite(value):
                badness[item.name] = rule.condition.margin(value)
    collected.missing.sort(key=lambda violation: badness.get(violation.layer or "", -inf))
    return collected


def _distrust_baseline(old: Item | None) -> str | None:
    """Return why a layer cannot be compared with its counterpart in the baseline; None if it can.

    A rule may skip new layers, but never such a layer, because it may have got worse.
    """
    if old is None or old.trouble is None:
        return None
    return f"{'was not compared' if old.kind == 'not_compared' else 'cannot be relied on'} in the baseline"


def _judge_each(condition: Condition, numbers: ItemValues, before: dict[str, Item]) -> _Outcome:
    """Judge every item by itself."""
    operator, limit = OPERATORS[condition.operator], condition.limit
    violating = [
        _make_violation(condition, item.name, value, before.get(item.name))
        for item, value in numbers.known
        if not operator.holds(value, limit)
    ]
    violating.sort(key=lambda violation: (violation.margin is not None, violation.margin))
    if violations := numbers.missing + violating:
        return _Outcome(violations, violations[0].observed, violations[0].layer)
    if not numbers.known:
        return _fail_without_value(f"no selected {condition.item} has {condition.metric}")
    item, value = min(numbers.known, key=lambda known: operator.margin(known[1], limit))
    return _Outcome([], value, item.name)


def _judge_together(condition: Condition, numbers: ItemValues) -> _Outcome:
    """Judge all items together.

    Items that are identical on both sides improve the result, so they count only if there are no others. For costs
    (bits per weight) they always count, because an identical item has a cost, too.
    """
    if numbers.missing:
        return _Outcome(numbers.missing, worst_layer=numbers.missing[0].layer)
    known = [v for item, v in numbers.known if not item.identical or condition.metric not in item.perfect]
    known = known or [value for _, value in numbers.known]
    if not known:
        return _fail_without_value(f"no selected {condition.item} has {condition.metric}")
    if condition.inner:
        return _judge_value(condition, sum(map(condition.inner.holds, known)) / len(known))
    return _judge_value(condition, condition.statistic(known))


def _make_violation(condition: Condition, layer: str | None, value: float, old: Item | None = None) -> Violation:
    """Return a violation; ``old`` is the same item in the baseline."""
    if isfinite(value):
        return Violation(layer, value, _compute_margin(condition, value), None)
    if condition.function not in BASELINE_FUNCTIONS:
        return Violation(layer, None, None, f"{condition.metric} is {value}")
    was = "; it was the same on both sides in the baseline" if old and old.kind == "lossless" else ""
    return Violation(layer, None, None, f"{condition.function}({condition.metric}) is {value}{was}")


def _compute_margin(condition: Condition, value: float) -> float | None:
    """Return the margin, or None if it is infinite."""
    margin = condition.margin(value)
    return margin if isfinite(margin) else None


def _make_gate(rule: Rule, outcome: _Outcome) -> Gate:
    observed = outcome.observed if outcome.observed is not None and isfinite(outcome.observed) else None
    gate = Gate(
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
        margin=None if observed is None else _compute_margin(rule.condition, observed),
        worst_layer=outcome.worst_layer,
        message="",
        violations=outcome.violations,
        is_unjudged=outcome.unjudged,
        item=rule.condition.item,
    )
    success = (
        "by the rules of --for" if rule.condition.scope == "loading" else _describe_success(gate, outcome.observed)
    )
    holds = f"gate {format_rule(rule)} holds: {success}"
    gate.message = format_failure(gate) if outcome.violations else holds
    return gate


def format_rule(rule: Rule) -> str:
    """Return the name of a rule: its id and its condition."""
    return name_rule(rule.id, rule.condition.text)


def name_rule(id: str, condition: str) -> str:
    """Return the name of the rule with this id, which is its condition if no other was given."""
    return display(condition) if id == condition else f"{display(id)}: {display(condition)}"


def format_failure(gate: Gate, has_cause: bool = True) -> str:
    """Return the message of a gate that does not hold; ``has_cause`` adds the finding that explains the number."""
    word = "cannot be judged" if gate.is_unjudged else "does not hold"
    return f"gate {name_rule(gate.id, gate.require)} {word}: {_describe_failure(gate, has_cause)}"


def _describe_failure(gate: Gate, has_cause: bool = True) -> str:
    first = gate.violations[0]
    reason, cause = display(first.reason or "", 2000), ""
    if first.observed is None:
        words = reason
    else:
        words = _format_beside_limit(first.observed, gate.limit, first.margin)
        cause = f"{BECAUSE}{reason}" if first.reason and has_cause else ""
    if first.layer is None:
        return f"{words}{_describe_base(gate)}{cause}"
    return f"{len(gate.violations):,} of {_count_items(gate)}, the worst {display(first.layer)}: {words}{cause}"


def _describe_success(gate: Gate, observed: float | None) -> str:
    """Describe a gate that holds; ``observed`` may be infinite."""
    if gate.judged and gate.judged == gate.identical:
        return f"{count(gate.judged, gate.item)}{_describe_skipped(gate)}, the same on both sides"
    words = f"no {gate.item} differs" if observed is None else _format_beside_limit(observed, gate.limit, gate.margin)
    if gate.worst_layer is None:
        return f"{words}{_describe_base(gate)}"
    return f"{_count_items(gate)}, the nearest {display(gate.worst_layer)}: {words}"


def _count_items(gate: Gate) -> str:
    identical = f" ({gate.identical:,} identical)" if gate.identical else ""
    return count(gate.judged, gate.item) + identical + _describe_skipped(gate)


def _describe_skipped(gate: Gate) -> str:
    return f", {gate.skipped:,} skipped" if gate.skipped else ""


def _describe_base(gate: Gate) -> str:
    return f" over {_count_items(gate)}" if gate.judged else ""


def format_value(rule: Rule, value: float) -> str:
    """Format a value and its margin with enough digits to show on which side of the limit the value is."""
    return _format_beside_limit(value, rule.condition.limit, _compute_margin(rule.condition, value))


def _format_beside_limit(value: float, limit: float, margin: float | None) -> str:
    return format_decisive(value, limit) + ("" if margin is None else f" (margin {format_decisive(margin, 0)})")
