"""Which layers a rule is about."""

from collections.abc import Callable

from quanterr.errors import UsageError
from quanterr.gates.rules import Rule
from quanterr.report.subjects import Item, Subject
from quanterr.selection import Selection
from quanterr.util.text import display


def selector(rule: Rule) -> Callable[[Item], bool]:
    """Whether a rule selects a tensor. Norms and biases that differ only if a pattern names them."""
    if not rule.layers:
        return lambda item: item.kind != "other_changes"
    selection = Selection(rule.layers)
    return lambda item: selection.takes(item.name)


def decider(rules: list[Rule], n: int) -> Callable[[Item], bool]:
    """Whether rule n decides for a tensor: it selects it, and no later rule of the same id does."""
    takes = selector(rules[n])
    later = [selector(rule) for rule in rules[n + 1 :] if rule.id == rules[n].id]
    return lambda item: takes(item) and not any(other(item) for other in later)


def check_patterns(rules: list[Rule], subject: Subject) -> None:
    """Raise UsageError for the first pattern that matches nothing."""
    for rule in rules:
        if dead := dead_pattern(rule, subject):
            raise UsageError(f'{rule.place}rule "{display(rule.id)}": {dead}')


def dead_pattern(rule: Rule, subject: Subject) -> str | None:
    """What to say of a pattern that matches nothing, one that leaves out as well: the rule is not what it looks."""
    if not rule.layers:
        return None
    try:
        Selection(rule.layers).check_all(item.name for item in subject.list_items(rule.condition.metric))
    except UsageError as error:
        patterns = display(" ".join(subject.patterns), 200)
        return f"{error} (the report is of {patterns} alone)" if patterns else str(error)
    return None
