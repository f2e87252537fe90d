"""What is told of gates on standard error."""

from quanterr.report.verdicts import Gate, Violation
from quanterr.text import MAX_LINE, count, display, unrounded

MAX_VIOLATIONS = 5  # of a gate
REASON_LENGTH = 2000


def gate_lines(gates: list[Gate]) -> list[str]:
    """A line for each gate, what stands against it below; first those that do not hold."""
    lines = [f"gates: {sum(gate.status == 'pass' for gate in gates)} of {len(gates)} hold"]
    for gate in sorted(gates, key=lambda gate: (gate.status == "pass", gate.severity)):
        mark = "pass" if gate.status == "pass" else {"error": "FAIL", "warn": "warn"}[gate.severity]
        lines.append(f"{mark}: {gate.message}")
        if gate.status == "fail":
            lines += _below(gate)
    return [display(line, MAX_LINE) for line in lines]


def _below(gate: Gate) -> list[str]:
    lines = [f"      because: {display(gate.reason, REASON_LENGTH)}"] if gate.reason else []
    of_layers = [violation for violation in gate.violations if violation.layer is not None]
    if len(of_layers) < 2:  # the message has said it
        return lines
    lines += [f"      - {violation_text(gate, violation)}" for violation in of_layers[:MAX_VIOLATIONS]]
    if len(of_layers) > MAX_VIOLATIONS:
        lines.append(f"      and {count(len(of_layers) - MAX_VIOLATIONS, 'more layer')}")
    return lines


def violation_text(gate: Gate, violation: Violation) -> str:
    """One layer against the limit, nothing rounded."""
    name = display(violation.layer or "")
    if violation.observed is None:
        return f"{name}: {display(violation.reason or '', REASON_LENGTH)}"
    margin = "" if violation.margin is None else f", margin {unrounded(violation.margin)}"
    return f"{name}: {unrounded(violation.observed)}, limit {unrounded(gate.limit)}{margin}"
