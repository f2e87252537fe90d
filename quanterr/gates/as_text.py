"""Gate results as text for standard error."""

from collections.abc import Sequence

from msgspec.structs import replace

from quanterr.documents.gate_results import BECAUSE, Gate
from quanterr.outputs.formatting import describe_gate, describe_violation, sentence
from quanterr.util.colors import paint
from quanterr.util.text import MAX_LINE, display

MAX_VIOLATIONS = 5  # lines per gate
MARKS = {"pass": "pass", "fail": "FAIL", "warning": "warn"}


def format_gates(gates: Sequence[Gate], colored: bool = False) -> list[str]:
    """Return a line per gate, gates that do not hold first, each with its violations below.

    A cause that several gates share, such as a damaged layer, is printed once.
    """
    lines = [f"gates: {sum(gate.status == 'pass' for gate in gates)} of {len(gates)} hold"]
    said: set[str] = set()
    for gate in sorted(gates, key=lambda gate: (gate.status == "pass", gate.severity)):
        _, tone = describe_gate(gate)
        mark = paint(MARKS[tone], tone, colored)
        name, hold, why = gate.message.partition(" does not hold: ")
        value, _, cause = gate.message.partition(BECAUSE)
        message = f"{name}{hold}as above" if why and gate.observed is None and why in said else gate.message
        message = value if cause in said else message
        said |= {why, cause} - {""}
        lines.append(f"{mark}: {display(message, MAX_LINE)}")
        if gate.status == "fail":
            lines += [display(line, MAX_LINE) for line in _format_details(gate, said)]
    return lines


def _format_details(gate: Gate, said: set[str]) -> list[str]:
    lines = [f"      because: {sentence(gate.reason)}"] if gate.reason else []
    of_layers = [violation for violation in gate.violations if violation.layer is not None]
    if len(of_layers) < 2:  # the gate's message names a single one
        return lines
    for violation in of_layers[:MAX_VIOLATIONS]:
        is_said = violation.observed is not None and violation.reason in said
        lines.append(
            f"      - {describe_violation(replace(violation, reason=None) if is_said else violation, gate.limit)}"
        )
        said |= {violation.reason or ""} - {""}
    if len(of_layers) > MAX_VIOLATIONS:
        lines.append(f"      and {len(of_layers) - MAX_VIOLATIONS:,} more")
    return lines
