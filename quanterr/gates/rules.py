"""Rules from a thresholds file, from a preset (a thresholds file shipped with quanterr), and from the command line.

schema = 1

[[rule]]
id = "attn"                        # if several rules with this id select a layer, the last one decides
require = "snr_db >= 30"           # see expression.py
layers = ["*.self_attn.*"]         # as --layers-to-compare; without it, all weights
severity = "error"                 # or "warn": reported, but fails only with --strict-warnings
undefined = "fail"                 # or "skip": skips layers without the metric; with delta, new layers
reason = "below, prompts drift"    # shown if the rule does not hold
baseline_original = "same"         # or "any": the baseline may be of another finetune, with the same names and sizes
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, cast

from quanterr.documents.comparison.values import VOCABULARY as OF_REPORTS
from quanterr.documents.subjects import Vocabulary
from quanterr.errors import UsageError
from quanterr.gates.expression import BASELINE_FUNCTIONS, Condition, parse
from quanterr.gates.waivers import Waiver, read_waivers
from quanterr.selection import LayerSelection
from quanterr.util.rule_file import RuleTable, read_rule_tables, show_value
from quanterr.util.text import display

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}
KEYS = ("id", "require", "layers", "severity", "undefined", "reason", "baseline_original")


class Rule(NamedTuple):
    """A condition that a document has to satisfy."""

    id: str
    condition: Condition
    layers: tuple[str, ...] = ()
    severity: Literal["error", "warn"] = "error"
    undefined: Literal["fail", "skip"] = "fail"
    reason: str | None = None
    place: str = ""  # "thresholds.toml:12: " if the rule comes from a file
    baseline_original: Literal["same", "any"] = "same"
    among: tuple[str, ...] = ()  # patterns of the layers that are judged; empty for all
    waivers: tuple[Waiver, ...] = ()  # all waivers of the file; each of its rules has them all


def read_rules(
    thresholds: str | os.PathLike[str] | None,
    require: Iterable[str] = (),
    fail_if: Iterable[str] = (),
    strict_warnings: bool = False,
    baseline: bool = False,
    vocabulary: Vocabulary = OF_REPORTS,
    any_original: bool = False,
) -> list[Rule]:
    """Return the rules of a thresholds file or preset, followed by ``--require`` and ``--fail-if``.

    ``--fail-if`` requires the opposite, so undefined values fail there too. With ``strict_warnings`` all rules have
    severity error, and with ``any_original`` a baseline may have another original. If no rule compares with a given
    ``baseline``, a rule is added: no layer may be clearly worse.

    Raises:
        UsageError: the file cannot be read, is not TOML or has unknown entries; there is no rule; two rules contradict
            each other.
    """
    rules = [_make_rule(table, vocabulary) for table in _read_tables(thresholds)] if thresholds is not None else []
    conditions = [_parse(text, "--require", vocabulary) for text in _as_iterable(require)]
    conditions += [_parse(text, "--fail-if", vocabulary).negate() for text in _as_iterable(fail_if)]
    rules += [Rule(condition.text, condition) for condition in conditions]
    compared = any(rule.condition.function in BASELINE_FUNCTIONS for rule in rules)
    if baseline and not compared and vocabulary.no_worse and (rules or thresholds is None):
        condition = _parse(vocabulary.no_worse, "--baseline", vocabulary)
        rules.append(Rule("baseline", condition, reason="nothing may be clearly worse than the baseline"))
    if not rules:
        where = f"{_name_source(thresholds)}: has no [[rule]]" if thresholds is not None else "no rules given"
        raise UsageError(f"{where}; give --thresholds FILE, or --require '{vocabulary.example}'")
    _check_ids(rules)
    if any_original:
        rules = [rule._replace(baseline_original="any") for rule in rules]
    if thresholds is not None:
        path, where = PRESETS.get(os.fspath(thresholds), Path(thresholds)), _name_source(thresholds)
        waivers = tuple(read_waivers(path, where, [rule.id for rule in rules]))
        rules = [rule._replace(waivers=waivers) for rule in rules]
    return [rule._replace(severity="error") for rule in rules] if strict_warnings else rules


def _as_iterable(texts: Iterable[str]) -> Iterable[str]:
    """Return the conditions; a string becomes a list with this condition."""
    return [texts] if isinstance(texts, str) else texts


def check_baseline_use(rules: list[Rule], given: bool, updated: bool = False) -> None:
    """Raise UsageError if a rule needs a baseline and none is given, or a given one is neither used nor ``updated``."""
    comparing = [rule.condition.text for rule in rules if rule.condition.function in BASELINE_FUNCTIONS]
    if comparing and not given:
        raise UsageError(f"{display(comparing[0])} compares with an older report: give --baseline REPORT")
    if given and not comparing and not updated:
        takes = "only rules for reports, evaluations and comparisons of images can"
        raise UsageError(f"no rule compares with the baseline; {takes}")


def _read_tables(thresholds: str | os.PathLike[str]) -> list[RuleTable]:
    path, where = PRESETS.get(os.fspath(thresholds), Path(thresholds)), _name_source(thresholds)
    if path != Path(thresholds) and os.path.isfile(thresholds):
        name = display(os.fspath(thresholds))
        raise UsageError(f"{name}: is both a preset and a file; give ./{name} for the file, or rename it")
    try:
        return read_rule_tables(path, where, KEYS)
    except FileNotFoundError as error:
        raise UsageError(f"{where}: no such file; presets are {', '.join(PRESETS)}") from error


def _make_rule(rule_table: RuleTable, vocabulary: Vocabulary) -> Rule:
    table, where = rule_table.fields, rule_table.where
    condition = _parse(table["require"], f"{where}: require", vocabulary)
    return Rule(
        table["id"],
        condition,
        _check_patterns(table.get("layers", []), condition, where),
        cast(Literal["error", "warn"], table.get("severity", "error")),
        cast(Literal["fail", "skip"], table.get("undefined", "fail")),
        table.get("reason"),
        f"{rule_table.place}: ",
        cast(Literal["same", "any"], table.get("baseline_original", "same")),
    )


def _check_patterns(layers: object, condition: Condition, where: str) -> tuple[str, ...]:
    if not (isinstance(layers, list) and all(isinstance(pattern, str) for pattern in layers)):
        raise UsageError(f'{where}: layers must be a list such as ["attn", "*.mlp.*"], not {show_value(layers)}')
    if layers and not condition.of_items:
        raise UsageError(f"{where}: {display(condition.text)} applies to the whole model; it cannot have layers")
    try:
        return LayerSelection(layers).patterns
    except UsageError as error:
        raise UsageError(f"{where}: layers: {error}") from error


def _parse(text: str, where: str, vocabulary: Vocabulary) -> Condition:
    try:
        return parse(text, vocabulary)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _check_ids(rules: list[Rule]) -> None:
    """Check that rules with the same id can override each other."""
    first: dict[str, Rule] = {}
    for rule in rules:
        other = first.setdefault(rule.id, rule)
        if other is rule:
            continue
        shown = f'two rules have the id "{display(rule.id)}"'
        if not (rule.condition.per_item and other.condition.per_item):
            raise UsageError(f"{shown}; only rules that apply to each layer can share one")
        if not rule.layers:
            raise UsageError(f"{shown}, and the later rule selects all layers; give it layers, or another id")


def _name_source(thresholds: str | os.PathLike[str]) -> str:
    name = os.fspath(thresholds)
    return f"preset {name}" if name in PRESETS else display(name)
