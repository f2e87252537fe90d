"""Verdicts on GitHub: the summary of the job, and annotations.

A summary above 1 MiB is dropped as a whole, and of annotations only ten of a kind are shown. A name from a
checkpoint can be neither Markdown nor a workflow command.
"""

import os
from collections.abc import Callable, Iterable, Iterator

from quanterr.report.formatting import LONG, describe_violation, sentence
from quanterr.report.gate_results import Gate, HasGates
from quanterr.report.markdown import format_code
from quanterr.util.text import decisive, no_command, unrounded

SUMMARY = "GITHUB_STEP_SUMMARY"
MAX_SUMMARY = 900 << 10  # bytes, with what other commands of the step have written
MAX_ANNOTATIONS = 10
MOST_LAYERS = 20  # of a gate, the worst
LEFT_OUT = "\n_The rest is omitted: a summary may not be larger. The report has it._\n"


def here() -> bool:
    """Whether this runs under GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def annotations(judged: HasGates, candidate: str | None = None) -> list[str]:
    """Workflow commands: one for an unreliable result, one for each gate that does not hold."""
    failed = [gate for gate in judged.gates if gate.status == "fail"]
    failed.sort(key=lambda gate: gate.severity)  # "error" before "warn"
    found = [("error" if gate.severity == "error" else "warning", gate.message) for gate in failed]
    if judged.verdict == "inconclusive":
        found.insert(0, ("error", f"inconclusive: {judged.reasons[0]}"))
    if len(found) > MAX_ANNOTATIONS:
        kind = found[MAX_ANNOTATIONS - 1][0]  # the worst of those left out
        found[MAX_ANNOTATIONS - 1 :] = [(kind, f"and {len(found) - MAX_ANNOTATIONS + 1} more gates do not hold")]
    of = "" if candidate is None else f"{candidate}: "
    return [f"::{kind} title=quanterr::{_escaped(no_command(sentence(of + text)))}" for kind, text in found]


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def has_summary() -> bool:
    """Whether the job takes a summary."""
    return here() and bool(os.environ.get(SUMMARY))


def write_summary(judged: HasGates, candidate: str | None = None) -> str | None:
    """Append the verdict to ``$GITHUB_STEP_SUMMARY``, where it is set; why it could not be written, or None."""
    return _append(lambda room: summary(judged, room, candidate))


def write_numbers(section: str, change: str) -> str | None:
    """Append the section of a document, Markdown, and what changed since the baseline; as :func:`write_summary`."""
    numbers = "".join(line for line in section.splitlines(keepends=True) if not line.startswith("<!-- quanterr:"))
    text = f"{_code(change)}\n\n{numbers}\n" if change else f"{numbers}\n"
    return _append(lambda room: text if len(text.encode()) <= room - len(LEFT_OUT) else LEFT_OUT)


def _append(make: Callable[[int], str]) -> str | None:
    path = os.environ.get(SUMMARY)
    if not path:
        return None
    try:
        with open(path, "ab") as file:
            file.write(make(MAX_SUMMARY - file.tell()).encode())
    except (OSError, ValueError) as error:
        return f"${SUMMARY}: {getattr(error, 'strerror', None) or error}"
    return None


def summary(judged: HasGates, limit: int = MAX_SUMMARY, candidate: str | None = None) -> str:
    """The verdict in Markdown, at most ``limit`` bytes of it."""
    pieces: list[str] = []
    size = len(LEFT_OUT.encode())
    for piece in _summary(judged, candidate):
        size += len(piece.encode())
        if size > limit:
            return "".join(pieces) + (LEFT_OUT if pieces else "")
        pieces.append(piece)
    return "".join(pieces)


def _summary(judged: HasGates, candidate: str | None) -> Iterator[str]:
    of = "" if candidate is None else f" {_code(candidate)}"
    yield f"### quanterr{of}: {judged.verdict}\n\n"
    if judged.verdict == "inconclusive":
        yield from (f"- {_code(reason)}\n" for reason in judged.reasons)
        yield "\n"
    if not judged.gates:
        return
    yield "| gate | holds | condition | value | limit | margin |\n|---|---|---|---:|---:|---:|\n"
    for gate in judged.gates:
        yield _row([_code(gate.id), _holds(gate), _code(gate.require), *_numbers(gate)])
    for gate in judged.gates:
        if gate.status == "fail":
            yield f"\n{_code(gate.message)}{', because: ' + _code(gate.reason) if gate.reason else ''}\n\n"
            layers = [violation for violation in gate.violations if violation.layer is not None]
            yield from (f"- {_code(describe_violation(v, gate.limit))}\n" for v in layers[:MOST_LAYERS])
            if len(layers) > MOST_LAYERS:
                yield f"- and {len(layers) - MOST_LAYERS:,} more\n"
    yield "\n"


def _holds(gate: Gate) -> str:
    return "yes" if gate.status == "pass" else "**no**" if gate.severity == "error" else "no (warns)"


def _numbers(gate: Gate) -> tuple[str, str, str]:
    observed = "" if gate.observed is None else decisive(gate.observed, gate.limit)
    return observed, unrounded(gate.limit), "" if gate.margin is None else decisive(gate.margin, 0)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _code(text: str) -> str:
    return format_code(text, LONG)
