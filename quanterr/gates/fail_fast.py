"""``--fail-fast``: stop at the first layer that violates a rule of severity error."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from quanterr.documents.gate_results import Violation
from quanterr.documents.subjects import Item, Subject
from quanterr.errors import UsageError
from quanterr.gates.rules import Rule
from quanterr.gates.selectors import make_decider
from quanterr.gates.verdicts import collect_values, format_rule, format_value
from quanterr.gates.waivers import find_waived
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.documents.comparison.layer import Layer


def make_violation_check(rules: list[Rule], baseline: Subject | None) -> "Callable[[Layer], str | None]":
    """Return a function that describes the rule that a layer violates, or returns None.

    Raises:
        UsageError: there is no rule of severity error about single layers.
    """
    if not rules:
        raise UsageError("--fail-fast: no rules given; give --thresholds FILE, or --require 'snr_db >= 30'")
    of_layers = [
        (rule, make_decider(rules, n))
        for n, rule in enumerate(rules)
        if rule.severity == "error" and rule.condition.per_item
    ]
    if not of_layers:
        raise UsageError("--fail-fast: no rule of severity error applies to single layers, such as 'snr_db >= 30'")
    before = {item.name: item for item in baseline.items} if baseline else {}

    def find_violation(layer: "Layer") -> str | None:
        list_name = "layers" if len(layer.tensor_shape) > 1 else "other_changes"
        item = Item(layer.layer_name, list_name, layer)
        for rule, takes in of_layers:
            if not takes(item):
                continue
            numbers = collect_values([item], rule, before)
            against = [missing.reason for missing in numbers.missing]
            against += [format_value(rule, value) for _, value in numbers.known if not rule.condition.holds(value)]
            if against and not find_waived(rule.waivers, rule.id, [Violation(item.name, None, None, None)]):
                return f"gate {format_rule(rule)} does not hold for {display(item.name)}: {against[0]}"
        return None

    return find_violation
