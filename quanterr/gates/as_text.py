"""Gate results as text for standard error."""

from collections.abc import Sequence

from msgspec.structs import replace

from quanterr.documents.gate_results import Gate
from quanterr.gates.verdicts import format_failure, name_rule
from quanterr.outputs.formatting import describe_gate, describe_violation, sentence
from quanterr.util.colors import paint
from quanterr.util.text import MAX_LINE, display

MAX_VIOLATIONS = 5  # lines per gate
MARKS = {"pass": "pass", "fail": "FAIL", "warning": "warn"}
Printed = set[tuple[str | None, str | None]]  # (layer, its reason), or (None, a finding that explains a number)


def format_gates(gates: Sequence[Gate], colored: bool = False) -> list[str]:
    """Return a line for each gate, with its violations below; gates that do not hold come first.

    A cause that several gates share, such as a damaged layer, is printed once.
    """
    unjudged = sum(gate.is_unjudged for gate in gates)
    not_judged = f", {unjudged} not judged" if unjudged else ""
    lines = [f"gates: {sum(gate.status == 'pass' for gate in gates)} of {len(gates)} hold{not_judged}"]
    printed: Printed = set()
    for gate in sorted(gates, key=lambda gate: (gate.status == "pass", gate.is_unjudged, gate.severity)):
        _, tone = describe_gate(gate)
        mark = paint("not judged" if gate.is_unjudged else MARKS[tone], tone, colored)
        lines.append(f"{mark}: {display(_shorten_message(gate, printed), MAX_LINE)}")
        if gate.status == "fail":
            lines += [display(line, MAX_LINE) for line in _format_details(gate, printed)]
        lines += [display(line, MAX_LINE) for line in _format_waived(gate)]
    other = next((gate.baseline_original for gate in gates if gate.baseline_original), None)
    return lines if other is None else [*lines, display(f"note: the baseline has another original: {other}", MAX_LINE)]


def _shorten_message(gate: Gate, printed: Printed) -> str:
    """Return a gate's message without a reason that an earlier gate has printed, and add its reason to ``printed``."""
    first = gate.violations[0] if gate.violations else None
    if first is None or first.reason is None:
        return gate.message
    is_new = (key := (first.layer if first.observed is None else None, first.reason)) not in printed
    printed.add(key)
    if is_new:
        return gate.message
    if first.observed is None:
        return f"gate {name_rule(gate.id, gate.require)}: as above"
    return format_failure(gate, has_cause=False)


def _format_waived(gate: Gate) -> list[str]:
    lines = [f"      - {describe_violation(violation, gate.limit)}" for violation in gate.waived[:MAX_VIOLATIONS]]
    more = len(gate.waived) - MAX_VIOLATIONS
    return [*lines, f"      and {more:,} more waived"] if more > 0 else lines


def _format_details(gate: Gate, printed: Printed) -> list[str]:
    lines = [f"      because: {sentence(gate.reason)}"] if gate.reason else []
    of_layers = [violation for violation in gate.violations if violation.layer is not None]
    if len(of_layers) < 2:  # the gate's message names a single layer
        return lines
    for violation in of_layers[:MAX_VIOLATIONS]:
        is_printed = violation.observed is not None and (None, violation.reason) in printed
        lines.append(
            f"      - {describe_violation(replace(violation, reason=None) if is_printed else violation, gate.limit)}"
        )
        printed.add((None, violation.reason))
    if len(of_layers) > MAX_VIOLATIONS:
        lines.append(f"      and {len(of_layers) - MAX_VIOLATIONS:,} more")
    return lines
