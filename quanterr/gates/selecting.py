"""Which layers a rule is about."""

from collections.abc import Callable

from quanterr.errors import UsageError
from quanterr.gates.rules import Rule
from quanterr.report.values import Values, Weight
from quanterr.selection import Selection
from quanterr.util.text import display


def selector(rule: Rule) -> Callable[[Weight], bool]:
    """Whether a rule selects a tensor. Norms and biases that differ only if a pattern names them."""
    if not rule.layers:
        return lambda weight: weight.kind != "other_changes"
    selection = Selection(rule.layers)
    return lambda weight: selection.takes(weight.name)


def decider(rules: list[Rule], n: int) -> Callable[[Weight], bool]:
    """Whether rule n decides for a tensor: it selects it, and no later rule of the same id does."""
    takes = selector(rules[n])
    later = [selector(rule) for rule in rules[n + 1 :] if rule.id == rules[n].id]
    return lambda weight: takes(weight) and not any(other(weight) for other in later)


def check_patterns(rules: list[Rule], values: Values) -> None:
    """Raise UsageError for the first pattern that matches nothing."""
    for rule in rules:
        if dead := dead_pattern(rule, values):
            raise UsageError(f'{rule.place}rule "{display(rule.id)}": {dead}')


def dead_pattern(rule: Rule, values: Values) -> str | None:
    """What to say of a pattern that matches nothing, one that leaves out as well: the rule is not what it looks."""
    try:
        Selection(rule.layers).check(weight.name for weight in values.weights)
    except UsageError as error:
        patterns = values.report["selection"]["patterns"]
        return f"{error} (the report is of {display(' '.join(patterns), 200)} alone)" if patterns else str(error)
    return None
