"""Waivers: faults that their user knows, and accepts until a day, for a reason.

[[waive]]
rule = "layers"                # the id of a rule that need not hold; or finding = "excess_error", the code of a finding
layers = ["*.layers.0.*"]      # as in rules; without it, what is about the whole
until = 2027-03-01             # the last day
reason = "outliers, known since the first release"

A waived finding becomes an info that says so; each judgement starts from the original severities, so that nothing stays
waived by a stored result. A rule leaves the waived layers out, and its gate lists them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from quanterr.documents.base import Finding, Waived
from quanterr.documents.finding_codes import CODES
from quanterr.documents.gate_results import Gate, Reason, Violation, list_errors, list_reasons, store_reasons
from quanterr.errors import UsageError
from quanterr.selection import LayerSelection
from quanterr.util.rule_file import read_tables, show_value
from quanterr.util.text import display, listed

if TYPE_CHECKING:
    from quanterr.documents.document import Document

    DocumentT = TypeVar("DocumentT", bound=Document)

KEYS = ("rule", "finding", "layers", "until", "reason")


@dataclass(frozen=True)
class Waiver:
    """A fault that is accepted until a day."""

    rule: str | None
    finding: str | None
    layers: tuple[str, ...]
    until: date
    reason: str
    place: str  # "thresholds.toml: waiver 2"

    @property
    def is_over(self) -> bool:
        """True after its last day."""
        return _today() > self.until

    def takes(self, layer: str | None) -> bool:
        """Return whether it is about this layer, or, for None, about the whole."""
        return not self.layers if layer is None else bool(self.layers) and LayerSelection(self.layers).takes(layer)

    def __str__(self) -> str:
        return f"waived until {self.until}: {display(self.reason)}"


def _today() -> date:
    return datetime.now().astimezone().date()


def read_waivers(thresholds: str | os.PathLike[str], name: str, rules: Sequence[str]) -> list[Waiver]:
    """Read the waivers of a thresholds file, called ``name`` in errors; ``rules`` are the ids of all rules.

    Raises:
        UsageError: the file is unreadable; a waiver has an unknown or missing entry, or names no rule or code.
    """
    tables = read_tables(thresholds, name, "waive")
    return [_make_waiver(table, f"{name}: waiver {n}", rules) for n, table in enumerate(tables, 1)]


def _make_waiver(table: dict[str, Any], where: str, rules: Sequence[str]) -> Waiver:
    if unknown := [key for key in table if key not in KEYS]:
        raise UsageError(f"{where}: unknown key {display(unknown[0])}; known keys: {', '.join(KEYS)}")
    if ("rule" in table) == ("finding" in table):
        raise UsageError(f'{where}: needs either rule = "…", the id of a rule, or finding = "…", a code')
    key, known = ("rule", rules) if "rule" in table else ("finding", tuple(CODES))
    if table[key] not in known:
        near = get_close_matches(str(table[key]), known, n=1)
        hint = f"did you mean {display(near[0])}?" if near else f"there are {listed(list(known), 5)}"
        raise UsageError(f"{where}: no {key} is called {show_value(table[key])}; {hint}")
    until, reason, layers = table.get("until"), table.get("reason"), table.get("layers", [])
    if not isinstance(until, date) or isinstance(until, datetime):
        raise UsageError(f"{where}: needs until = 2027-03-01, its last day, without quotes")
    if not isinstance(reason, str) or not reason.strip():
        raise UsageError(f'{where}: needs reason = "…"')
    if not (isinstance(layers, list) and all(isinstance(pattern, str) for pattern in layers)):
        raise UsageError(f'{where}: layers must be a list such as ["attn", "*.mlp.*"], not {show_value(layers)}')
    patterns = LayerSelection(layers).patterns
    return Waiver(table.get("rule"), table.get("finding"), patterns, until, reason, where)


def find_waived(waivers: Sequence[Waiver], rule: str, violations: Sequence[Violation]) -> list[Violation]:
    """Return the violations of a rule that are waived, with the waiver as their reason."""
    of_rule = [waiver for waiver in waivers if waiver.rule == rule and not waiver.is_over]
    found = [
        (violation, next((waiver for waiver in of_rule if waiver.takes(violation.layer)), None))
        for violation in violations
    ]
    return [replace(one, reason=str(waiver)) for one, waiver in found if waiver]


def waive_findings(document: "DocumentT", waivers: Sequence[Waiver]) -> "DocumentT":
    """Return the document with its waived findings as infos, and all others with their own severity."""
    candidates = getattr(document, "candidates", None)
    if candidates is None:
        return _waive(document, waivers)  # type: ignore[no-any-return]
    return replace(document, candidates=[_waive(candidate, waivers) for candidate in candidates])


def _waive(judged: Any, waivers: Sequence[Waiver]) -> Any:
    """Return a result, or a candidate, with its findings after all waivers, and the reasons that follow from them."""
    before: Sequence[Finding] = getattr(judged, "findings", ())
    after = [_waive_finding(_restore(found), waivers) for found in before]
    if after == list(before):
        return judged
    if not hasattr(judged, "verdict"):  # of an inspection, rules judge the findings themselves
        return replace(judged, findings=after)
    own = [one for one in list_reasons(judged) if one.by == "result"] if judged.verdict == "inconclusive" else []
    reasons = own + list_errors(after)
    verdict = "inconclusive" if reasons else "pass"
    found = store_reasons(reasons or [Reason("everything selected was compared", "result")])
    return replace(judged, findings=after, verdict=verdict, **found)


def _waive_finding(found: Finding, waivers: Sequence[Waiver]) -> Finding:
    fits = (
        waiver
        for waiver in waivers
        if waiver.finding == found.code and not waiver.is_over and waiver.takes(found.layer)
    )
    waiver = None if found.severity == "info" else next(fits, None)
    if waiver is None:
        return found
    waived = Waived(found.severity, found.message, waiver.until.isoformat(), waiver.reason)
    return replace(found, severity="info", message=f"{found.message}; {found.severity} {waiver}", waived=waived)


def _restore(found: Finding) -> Finding:
    """Return a finding as it was before a waiver."""
    was = found.waived
    return found if was is None else replace(found, severity=was.severity, message=was.message, waived=None)


def list_notes(waivers: Sequence[Waiver], gates: Sequence[Gate], findings: Sequence[Finding]) -> list[str]:
    """Return a line for each waiver that has expired, or that nothing needs any more."""
    notes = []
    for waiver in waivers:
        of = f"{waiver.place} of {display(waiver.rule or waiver.finding or '')}"
        violated = [violation.layer for gate in gates if gate.id == waiver.rule for violation in gate.waived]
        found = [finding.layer for finding in findings if finding.code == waiver.finding and finding.waived]
        if waiver.is_over:
            notes.append(f"{of} ended on {waiver.until}: it waives nothing")
        elif not any(map(waiver.takes, [*violated, *found])):
            notes.append(f"{of} is no longer needed: remove it")
    return notes
