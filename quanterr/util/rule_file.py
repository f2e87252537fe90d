"""Strict reading of rules from a TOML file: a schema number, then ``[[rule]]`` tables. Conditions are not parsed here.

schema = 1

[[rule]]
id = "attn"
require = "snr_db >= 30"
"""

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display
from quanterr.util.toml_file import read_toml

SCHEMA = 1
CHOICES = {"severity": ("error", "warn"), "undefined": ("fail", "skip"), "baseline_original": ("same", "any")}
_RULE = re.compile(r"^[ \t]*\[\[[ \t]*[\"']?rule[\"']?[ \t]*\]\]", re.MULTILINE)


class RuleTable(NamedTuple):
    """One rule as written in the file, and its location for error messages."""

    fields: JsonObject
    place: str  # such as thresholds.toml:12

    @property
    def where(self) -> str:
        """The rule's location and name, for error messages."""
        return f'{self.place}: rule "{display(self.fields["id"])}"'


def read_rule_tables(path: str | os.PathLike[str], name: str, known: tuple[str, ...]) -> list[RuleTable]:
    """Read the rules of a file; errors call the file ``name``, and ``known`` are the keys that a rule may have.

    Raises:
        FileNotFoundError: the file does not exist.
        UsageError: the file is unreadable, is not TOML, or has an unknown key or an invalid value.
    """
    text, fields = read_toml(Path(path), name)
    _check_keys(fields, ("schema", "rule", "waive"), name)
    if fields.get("schema") != SCHEMA or isinstance(fields["schema"], bool):
        raise UsageError(f"{name}: the first line must be: schema = {SCHEMA}")
    tables = _pick_tables(fields, "rule", name)
    lines = [text.count("\n", 0, match.start()) + 1 for match in _RULE.finditer(text)]
    places = [f"{name}:{line}" for line in lines] if len(lines) == len(tables) else [name] * len(tables)
    rules = [RuleTable(table, place) for table, place in zip(tables, places, strict=True)]
    for table in rules:
        _check(table, known)
    return rules


def read_tables(path: str | os.PathLike[str], name: str, key: str) -> list[JsonObject]:
    """Return the tables ``[[key]]`` of a file, as they are written; errors call the file ``name``.

    Raises:
        UsageError: the file is unreadable or is not TOML, or the key is not such a list of tables.
    """
    return _pick_tables(read_toml(Path(path), name)[1], key, name)


def _pick_tables(fields: JsonObject, key: str, name: str) -> list[JsonObject]:
    tables = fields.get(key, [])
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise UsageError(f"{name}: {key}s are written as [[{key}]]")
    return tables


def _check(table: RuleTable, known: tuple[str, ...]) -> None:
    for key in ("id", "require"):
        if not isinstance(table.fields.get(key), str) or not table.fields[key].strip():
            raise UsageError(f'{table.place}: a rule needs {key} = "…"')
    _check_keys(table.fields, known, table.where)
    for key, choices in CHOICES.items():
        if table.fields.get(key, choices[0]) not in choices:
            shown = show_value(table.fields[key])
            raise UsageError(f"{table.where}: {key} must be one of {', '.join(choices)}, not {shown}")
    if not isinstance(table.fields.get("reason", ""), str):
        raise UsageError(f"{table.where}: reason must be a string, not {show_value(table.fields['reason'])}")


def _check_keys(table: JsonObject, known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise UsageError(f"{where}: unknown key {display(key)}; {hint}")


def show_value(value: object) -> str:
    """Return a value from a file, escaped and shortened for an error message."""
    return display(repr(value), 60)
