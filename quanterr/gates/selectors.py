"""Selection of the layers that a rule applies to."""

from collections.abc import Callable, Iterable, Sequence

from quanterr.documents.subjects import Item, Subject
from quanterr.errors import UsageError
from quanterr.gates.rules import Rule
from quanterr.selection import LayerSelection
from quanterr.util.text import display


def make_selector(rule: Rule) -> Callable[[Item], bool]:
    """Return a function that checks whether a rule selects an item.

    Norms and biases that differ are selected only if a pattern names them.
    """
    among, selection = LayerSelection(rule.among), LayerSelection(rule.layers)
    if not rule.layers:
        return lambda item: item.kind != "other_changes" and among.takes(item.name)
    return lambda item: selection.takes(item.name) and among.takes(item.name)


def restrict_rules(rules: list[Rule], layers: Iterable[str], subjects: Sequence[Subject]) -> list[Rule]:
    """Return rules restricted to the layers that the patterns select; rules about the whole are not changed.

    Rules for other layers are left out. Without patterns, all rules are returned unchanged.

    Raises:
        UsageError: a pattern is invalid, or no rule is about the layers that the patterns select.
    """
    among = LayerSelection(layers).patterns
    if not among:
        return rules
    check_patterns([rule._replace(layers=among) for rule in rules if rule.condition.of_items], subjects[0])
    restricted = [rule._replace(among=among) for rule in rules]
    kept = [rule for rule in restricted if not rule.condition.of_items or _selects_any(rule, subjects)]
    if not any(rule.condition.of_items for rule in kept):
        raise UsageError(f"--layers {display(','.join(among))}: no rule is about these layers")
    return kept


def _selects_any(rule: Rule, subjects: Sequence[Subject]) -> bool:
    takes = make_selector(rule)
    return any(takes(item) for subject in subjects for item in subject.list_items(rule.condition.metric))


def make_decider(rules: list[Rule], n: int) -> Callable[[Item], bool]:
    """Return a function that checks whether rule n decides for an item: no later rule with its id selects the item."""
    takes = make_selector(rules[n])
    later = [make_selector(rule) for rule in rules[n + 1 :] if rule.id == rules[n].id]
    return (lambda item: takes(item) and not any(other(item) for other in later)) if later else takes


def check_patterns(rules: list[Rule], subject: Subject) -> None:
    """Raise UsageError if a pattern matches nothing."""
    for rule in rules:
        if dead := explain_dead_pattern(rule, subject):
            raise UsageError(f'{rule.place}rule "{display(rule.id)}": {dead}')


def explain_dead_pattern(rule: Rule, subject: Subject) -> str | None:
    """Return a message about a pattern, including or excluding, that matches nothing; None if all match."""
    if not rule.layers:
        return None
    try:
        LayerSelection(rule.layers).check_all(item.name for item in subject.list_items(rule.condition.metric))
    except UsageError as error:
        patterns = display(" ".join(subject.patterns), 200)
        return f"{error} (the report covers only {patterns})" if patterns else str(error)
    return None
