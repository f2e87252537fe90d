"""The answer of a report whose gates do not hold: the rule, where it fails most, and by how much, in one line."""

import re
from collections.abc import Sequence

from quanterr.documents.comparison.model import Report
from quanterr.documents.gate_results import Gate, Violation
from quanterr.outputs.formatting import format_db, sentence
from quanterr.util.text import count, display, format_decisive

DELTA_OF_SNR = re.compile(r"delta\((snr_db)\)")  # the start of a condition


def list_judged_failures(report: Report) -> list[Gate]:
    """Return the gates of severity error that do not hold, without those that could not be judged."""
    failed = [gate for gate in report.gates if gate.status == "fail" and gate.severity == "error"]
    return [gate for gate in failed if not gate.is_unjudged]


def describe_failed_gates(report: Report) -> str:
    """Return which gates of severity error do not hold, the first with its worst layer; without any, the reason."""
    failed = list_judged_failures(report)
    if not failed:  # an edited report
        return sentence(report.reasons[0] if report.reasons else "no reason given")
    first = failed[0]
    named = f"{display(first.id)}: " if first.id != first.require else ""
    n = len(failed) - 1
    others = f"; {count(n, 'more gate')} of {len(report.gates):,} {'does' if n == 1 else 'do'} not hold" if n else ""
    return f"{named}{sentence(first.require)} does not hold{_describe_worst(report, first)}{others}"


def _describe_worst(report: Report, gate: Gate) -> str:
    """Return where a gate fails most, and how many more layers fail it."""
    worst: Sequence[Violation] = gate.violations[:1]
    if not worst or (worst[0].observed is None and worst[0].layer is None):
        return f": {sentence(worst[0].reason or 'undefined')}" if worst else ""
    more = f", and {count(len(gate.violations) - 1, 'more layer')}" if gate.violations[1:] else ""
    if worst[0].observed is None:
        return f": {display(worst[0].layer or '')}: {sentence(worst[0].reason or 'undefined')}{more}"
    where = "" if worst[0].layer is None else f"{display(worst[0].layer)} "
    return f": {where}{_format_value(report, gate, worst[0])}{more}"


def _format_value(report: Report, gate: Gate, worst: Violation) -> str:
    """Return the value that is beyond the limit; of a change, the values before and after it."""
    assert worst.observed is not None  # noqa: S101 - the caller describes others by their reason
    layer = next((layer for layer in report.layers if layer.layer_name == worst.layer), None)
    if DELTA_OF_SNR.match(gate.require) and layer is not None and layer.snr_db is not None:
        return f"{format_db(layer.snr_db - worst.observed)} -> {format_db(layer.snr_db, ' dB')}"
    return format_decisive(worst.observed, gate.limit)
