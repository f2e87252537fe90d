"""The explanation, rule by rule, why a layer passes or fails."""

from difflib import get_close_matches

from quanterr.documents.gate_results import Violation
from quanterr.documents.subjects import Item, Subject
from quanterr.errors import UsageError
from quanterr.gates.rules import Rule
from quanterr.gates.selectors import make_decider, make_selector
from quanterr.gates.verdicts import collect_values, format_rule, format_value
from quanterr.gates.waivers import find_waived
from quanterr.util.text import display, format_decisive


def explain_layer(subject: Subject, rules: list[Rule], name: str, baseline: Subject | None = None) -> list[str]:
    """Return lines that explain how each rule judges a layer, and which of several rules with the same id decides.

    Raises:
        UsageError: there is no layer of this name; the message suggests the nearest.
    """
    matching = [item for item in subject.items if name in (item.name, display(item.name))]
    if not matching:
        near = get_close_matches(name, [item.name for item in subject.items], n=3)
        hint = f"; did you mean {', '.join(map(display, near))}?" if near else ""
        raise UsageError(f"the {subject.vocabulary.document} has no layer named {display(name)}{hint}")
    lines = []
    for item in matching:
        lines.append(f"layer {display(item.name)}, in {item.kind}")
        lines += [
            f"  rule {format_rule(rule)}: {_explain_rule(item, subject, rules, n, baseline)}"
            f"{_explain_waiver(item, rule)}"
            for n, rule in enumerate(rules)
        ]
    return lines


def _explain_waiver(item: Item, rule: Rule) -> str:
    """Return the waiver of a rule for a layer, which matters only if the rule does not hold."""
    waived = find_waived(rule.waivers, rule.id, [Violation(item.name, None, None, None)])
    return f"; {waived[0].reason}" if waived else ""


def _explain_rule(item: Item, subject: Subject, rules: list[Rule], n: int, baseline: Subject | None) -> str:
    rule, condition = rules[n], rules[n].condition
    if not condition.of_items:
        return "applies to the whole model"
    if item not in subject.list_items(condition.metric):
        return f"applies to {condition.item}s"
    if not make_selector(rule)(item):
        return "does not select it"
    if not make_decider(rules, n)(item):
        return "selects it; a later rule with the same id decides"
    before = {old.name: old for old in baseline.list_items(condition.metric)} if baseline else {}
    numbers = collect_values([item], rule, before)
    if numbers.skipped:
        return f"skips it: {numbers.skipped[0].reason}"
    if numbers.missing:
        return f"does not hold: {display(numbers.missing[0].reason or '', 2000)}"
    value = numbers.known[0][1]
    if not condition.per_item:
        return f"includes it with {format_decisive(value)}"
    return f"{'holds' if condition.holds(value) else 'does not hold'}: {format_value(rule, value)}"
