"""Why one layer passes or does not, rule by rule."""

from difflib import get_close_matches

from quanterr.errors import UsageError
from quanterr.gates.judging import label, numbers_of, value_text
from quanterr.gates.rules import Rule
from quanterr.gates.selecting import decider, selector
from quanterr.report.values import Values, Weight
from quanterr.util.text import decisive, display


def explain(values: Values, rules: list[Rule], name: str, baseline: Values | None = None) -> list[str]:
    """What each rule says of one layer, and which of several of the same id decides.

    Raises:
        UsageError: no layer of that name; names the nearest.
    """
    weight = next((weight for weight in values.weights if name in (weight.name, display(weight.name))), None)
    if weight is None:
        near = get_close_matches(name, [weight.name for weight in values.weights], n=3)
        hint = f"; did you mean {', '.join(map(display, near))}?" if near else ""
        raise UsageError(f"the report has no layer named {display(name)}{hint}")
    before = {old.name: old for old in baseline.weights} if baseline else {}
    lines = [f"layer {display(weight.name)}, in {weight.kind}"]
    return lines + [f"  rule {label(rule)}: {_explained(weight, rules, n, before)}" for n, rule in enumerate(rules)]


def _explained(weight: Weight, rules: list[Rule], n: int, before: dict[str, Weight]) -> str:
    rule, condition = rules[n], rules[n].condition
    if not condition.of_layers:
        return "applies to the whole model"
    if not selector(rule)(weight):
        return "does not select it"
    if not decider(rules, n)(weight):
        return "selects it; a later rule of the same id decides"
    numbers = numbers_of([weight], rule, before)
    if numbers.skipped:
        return f"skips it: {numbers.skipped[0].reason}"
    if numbers.missing:
        return f"does not hold: {display(numbers.missing[0].reason or '', 2000)}"
    value = numbers.known[0][1]
    if not condition.per_layer:
        return f"includes it with {decisive(value)}"
    return f"{'holds' if condition.holds(value) else 'does not hold'}: {value_text(rule, value)}"
