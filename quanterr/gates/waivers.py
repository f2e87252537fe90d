"""Waivers: known faults that a user accepts until a day, for a reason.

[[waive]]
rule = "layers"                # the id of a rule that need not hold; or finding = "excess_error", the code of a finding
layers = ["*.layers.0.*"]      # as in rules; without layers, rules and findings about the whole are waived
until = 2027-03-01             # the last day
reason = "outliers, known since the first release"

A waived finding becomes an info that names the waiver. Each judgement starts from the original severities, so waivers
in a stored result do not persist. A rule leaves the waived layers out, and its gate lists them.
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
from quanterr.util.text import display, itemize

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
        """Whether its last day has passed."""
        return _today() > self.until

    def takes(self, layer: str | None) -> bool:
        """Return whether the waiver applies to this layer, or, for None, to the whole model."""
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
        hint = f"did you mean {display(near[0])}?" if near else f"there are {itemize(list(known), 5)}"
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
    matches = [
        (violation, next((waiver for waiver in of_rule if waiver.takes(violation.layer)), None))
        for violation in violations
    ]
    return [replace(violation, reason=str(waiver)) for violation, waiver in matches if waiver]


def waive_findings(document: "DocumentT", waivers: Sequence[Waiver]) -> "DocumentT":
    """Return the document with waived findings as infos, and all others with their original severity."""
    candidates = getattr(document, "candidates", None)
    if candidates is None:
        return _waive(document, waivers)  # type: ignore[no-any-return]
    return replace(document, candidates=[_waive(candidate, waivers) for candidate in candidates])


def _waive(judged: Any, waivers: Sequence[Waiver]) -> Any:
    """Return a result, or a candidate, with its findings after all waivers, and the reasons that follow from them."""
    before: Sequence[Finding] = getattr(judged, "findings", ())
    after = [_waive_finding(_restore(finding), waivers) for finding in before]
    if after == list(before):
        return judged
    if not hasattr(judged, "verdict"):  # an inspection, whose findings the rules judge
        return replace(judged, findings=after)
    by_result = (
        [reason for reason in list_reasons(judged) if reason.by == "result"] if judged.verdict == "inconclusive" else []
    )
    reasons = by_result + list_errors(after)
    verdict = "inconclusive" if reasons else "pass"
    stored_reasons = store_reasons(reasons or [Reason("everything selected was compared", "result")])
    return replace(judged, findings=after, verdict=verdict, **stored_reasons)


def _waive_finding(finding: Finding, waivers: Sequence[Waiver]) -> Finding:
    fits = (
        waiver
        for waiver in waivers
        if waiver.finding == finding.code and not waiver.is_over and waiver.takes(finding.layer)
    )
    waiver = None if finding.severity == "info" else next(fits, None)
    if waiver is None:
        return finding
    waived = Waived(finding.severity, finding.message, waiver.until.isoformat(), waiver.reason)
    return replace(finding, severity="info", message=f"{finding.message}; {finding.severity} {waiver}", waived=waived)


def _restore(finding: Finding) -> Finding:
    """Return a finding as it was before a waiver."""
    was = finding.waived
    return finding if was is None else replace(finding, severity=was.severity, message=was.message, waived=None)


def list_notes(waivers: Sequence[Waiver], gates: Sequence[Gate], findings: Sequence[Finding]) -> list[str]:
    """Return a line for each waiver that has expired, or that is no longer needed."""
    notes = []
    for waiver in waivers:
        label = f"{waiver.place} of {display(waiver.rule or waiver.finding or '')}"
        violated = [violation.layer for gate in gates if gate.id == waiver.rule for violation in gate.waived]
        waived_layers = [finding.layer for finding in findings if finding.code == waiver.finding and finding.waived]
        if waiver.is_over:
            notes.append(f"{label} ended on {waiver.until}: it waives nothing")
        elif not any(map(waiver.takes, [*violated, *waived_layers])):
            notes.append(f"{label} is no longer needed: remove it")
    return notes
