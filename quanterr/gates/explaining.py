"""Why one layer passes or does not, rule by rule."""

from difflib import get_close_matches

from quanterr.errors import UsageError
from quanterr.gates.judging import label, numbers_of, value_text
from quanterr.gates.rules import Rule
from quanterr.gates.selecting import decider, selector
from quanterr.report.subjects import Item, Subject
from quanterr.util.text import decisive, display


def explain(subject: Subject, rules: list[Rule], name: str, baseline: Subject | None = None) -> list[str]:
    """What each rule says of one layer, and which of several of the same id decides.

    Raises:
        UsageError: no layer of that name; names the nearest.
    """
    found = [item for item in subject.items if name in (item.name, display(item.name))]
    if not found:
        near = get_close_matches(name, [item.name for item in subject.items], n=3)
        hint = f"; did you mean {', '.join(map(display, near))}?" if near else ""
        raise UsageError(f"the {subject.vocabulary.document} has no layer named {display(name)}{hint}")
    lines = []
    for item in found:
        lines.append(f"layer {display(item.name)}, in {item.kind}")
        lines += [
            f"  rule {label(rule)}: {_explained(item, subject, rules, n, baseline)}" for n, rule in enumerate(rules)
        ]
    return lines


def _explained(item: Item, subject: Subject, rules: list[Rule], n: int, baseline: Subject | None) -> str:
    rule, condition = rules[n], rules[n].condition
    if not condition.of_items:
        return "applies to the whole model"
    if item not in subject.list_items(condition.metric):
        return f"applies to {condition.item}s"
    if not selector(rule)(item):
        return "does not select it"
    if not decider(rules, n)(item):
        return "selects it; a later rule of the same id decides"
    before = {old.name: old for old in baseline.list_items(condition.metric)} if baseline else {}
    numbers = numbers_of([item], rule, before)
    if numbers.skipped:
        return f"skips it: {numbers.skipped[0].reason}"
    if numbers.missing:
        return f"does not hold: {display(numbers.missing[0].reason or '', 2000)}"
    value = numbers.known[0][1]
    if not condition.per_item:
        return f"includes it with {decisive(value)}"
    return f"{'holds' if condition.holds(value) else 'does not hold'}: {value_text(rule, value)}"
