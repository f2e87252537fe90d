"""What ``--fail-fast`` stops at: the first layer that violates a rule of severity error, whatever is still to come."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from quanterr.errors import UsageError
from quanterr.gates.judging import label, numbers_of, value_text
from quanterr.gates.rules import Rule
from quanterr.gates.selecting import decider
from quanterr.report.reading import make_extractor
from quanterr.report.subjects import Item, Subject
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.model import Layer


def first_violation(rules: list[Rule], baseline: Subject | None) -> "Callable[[Layer], str | None]":
    """What says which rule a layer that was just compared violates, and None if it violates none.

    Raises:
        UsageError: no rule, or none of severity error that is about single layers.
    """
    if not rules:
        raise UsageError("--fail-fast: no rules given; give --thresholds FILE, or --require 'snr_db >= 30'")
    of_layers = [
        (rule, decider(rules, n))
        for n, rule in enumerate(rules)
        if rule.severity == "error" and rule.condition.per_item
    ]
    if not of_layers:
        raise UsageError("--fail-fast: no rule of severity error applies to single layers, such as 'snr_db >= 30'")
    extract = make_extractor({rule.condition.metric for rule, _ in of_layers})
    before = {item.name: item for item in baseline.items} if baseline else {}

    def violated(layer: "Layer") -> str | None:
        kind = "layers" if len(layer.tensor_shape) > 1 else "other_changes"
        item = Item(layer.layer_name, kind, extract(layer))
        for rule, takes in of_layers:
            if takes(item) and (against := _against(rule, item, before)):
                return f"gate {label(rule)} does not hold for {display(item.name)}: {against}"
        return None

    return violated


def _against(rule: Rule, item: Item, before: dict[str, Item]) -> str | None:
    numbers = numbers_of([item], rule, before)
    if numbers.missing:
        return numbers.missing[0].reason
    return next((value_text(rule, value) for _, value in numbers.known if not rule.condition.holds(value)), None)
