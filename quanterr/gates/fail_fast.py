"""What ``--fail-fast`` stops at: the first layer that violates a rule of severity error, whatever is still to come."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from quanterr.errors import UsageError
from quanterr.gates.judging import label, numbers_of, value_text
from quanterr.gates.rules import Rule
from quanterr.gates.selecting import decider
from quanterr.report.reading import extractor
from quanterr.report.values import Values, Weight
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.model import Layer


def first_violation(rules: list[Rule], baseline: Values | None) -> "Callable[[Layer], str | None]":
    """What says which rule a layer that was just compared violates, and None if it violates none.

    Raises:
        UsageError: no rule of severity error is about single layers.
    """
    of_layers = [
        (rule, decider(rules, n))
        for n, rule in enumerate(rules)
        if rule.severity == "error" and rule.condition.per_layer
    ]
    if not of_layers:
        raise UsageError("--fail-fast: no rule of severity error applies to single layers, such as 'snr_db >= 30'")
    extract = extractor({rule.condition.metric for rule, _ in of_layers})
    before = {weight.name: weight for weight in baseline.weights} if baseline else {}

    def violated(layer: "Layer") -> str | None:
        kind = "layers" if len(layer.tensor_shape) > 1 else "other_changes"
        weight = Weight(layer.layer_name, kind, extract(layer), None, {})
        for rule, takes in of_layers:
            if takes(weight) and (against := _against(rule, weight, before)):
                return f"gate {label(rule)} does not hold for {display(weight.name)}: {against}"
        return None

    return violated


def _against(rule: Rule, weight: Weight, before: dict[str, Weight]) -> str | None:
    numbers = numbers_of([weight], rule, before)
    if numbers.missing:
        return numbers.missing[0].reason
    return next((value_text(rule, value) for _, value in numbers.known if not rule.condition.holds(value)), None)
