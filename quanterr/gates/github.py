"""Verdicts on GitHub: the job summary, and annotations.

GitHub drops a summary above 1 MiB as a whole, and shows only ten annotations of each severity. Names from checkpoints
are escaped, so that they cannot act as Markdown or as a workflow command.
"""

import os
from collections.abc import Callable, Iterator

from quanterr.documents.gate_results import HasGates, list_other_reasons
from quanterr.outputs.formatting import MAX_SENTENCE_LENGTH, describe_violation, has_only_numbers, sentence
from quanterr.outputs.markdown import format_code
from quanterr.util.text import escape_commands, format_decisive, format_exact

SUMMARY = "GITHUB_STEP_SUMMARY"
MAX_SUMMARY = 900 << 10  # bytes, including what other commands of the step have written
MAX_ANNOTATIONS = 10
MAX_LAYERS = 20  # maximum number of layers shown for each gate, the worst first
OMISSION = "\n_The rest is omitted because summaries are limited in size. The report contains everything._\n"


def is_on_github() -> bool:
    """Return True under GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def make_annotations(judged: HasGates, candidate: str | None = None) -> list[str]:
    """Return workflow commands: one for an unreliable result, and one per gate that does not hold."""
    failed = [gate for gate in judged.gates if gate.status == "fail"]
    if judged.verdict == "inconclusive" and (others := [gate for gate in failed if not gate.is_unjudged]):
        failed = others
    failed.sort(key=lambda gate: gate.severity)  # "error" before "warn"
    annotations = [("error" if gate.severity == "error" else "warning", gate.message) for gate in failed]
    reasons = list_other_reasons(judged)
    if judged.verdict == "inconclusive" and reasons:  # otherwise an annotation of a gate has the reason
        annotations.insert(0, ("error", f"inconclusive: {reasons[0]}"))
    if len(annotations) > MAX_ANNOTATIONS:
        severity = annotations[MAX_ANNOTATIONS - 1][0]  # severity of the worst omitted gate
        number = len(annotations) - MAX_ANNOTATIONS + 1
        annotations[MAX_ANNOTATIONS - 1 :] = [(severity, f"and {number} more gates do not hold")]
    prefix = "" if candidate is None else f"{candidate}: "
    return [
        f"::{severity} title=quanterr::{escape_commands(sentence(prefix + text)).replace('%', '%25')}"
        for severity, text in annotations
    ]


def has_summary() -> bool:
    """Return True if the job takes a summary."""
    return is_on_github() and bool(os.environ.get(SUMMARY))


def write_summary(judged: HasGates, candidate: str | None = None) -> str | None:
    """Append the verdict to ``$GITHUB_STEP_SUMMARY``, if set, and return why it could not be written, or None."""
    return _append_to_summary(lambda room: format_summary(judged, room, candidate))


def write_numbers(numbers: str, change: str) -> str | None:
    """Append a document's Markdown and the change since the baseline; return what :func:`write_summary` returns."""
    text = f"{_format_code(change)}\n\n{numbers}\n" if change else f"{numbers}\n"
    return _append_to_summary(lambda room: text if len(text.encode()) <= room - len(OMISSION) else OMISSION)


def _append_to_summary(make: Callable[[int], str]) -> str | None:
    path = os.environ.get(SUMMARY)
    if not path:
        return None
    try:
        with open(path, "ab") as file:
            file.write(make(MAX_SUMMARY - file.tell()).encode())
    except (OSError, ValueError) as error:
        return f"${SUMMARY}: {getattr(error, 'strerror', None) or error}"
    return None


def format_summary(judged: HasGates, limit: int = MAX_SUMMARY, candidate: str | None = None) -> str:
    """Return the verdict in Markdown, at most ``limit`` bytes."""
    parts: list[str] = []
    size = len(OMISSION.encode())
    for part in _list_summary_parts(judged, candidate):
        size += len(part.encode())
        if size > limit:
            return "".join(parts) + (OMISSION if parts else "")
        parts.append(part)
    return "".join(parts)


def _list_summary_parts(judged: HasGates, candidate: str | None) -> Iterator[str]:
    whose = "" if candidate is None else f" {_format_code(candidate)}"
    yield f"### quanterr{whose}: {judged.verdict}\n\n"
    if judged.verdict == "inconclusive":
        yield from (f"- {_format_code(reason)}\n" for reason in list_other_reasons(judged))
        yield "\n"
    if not judged.gates:
        return
    yield "| gate | holds | condition | value | limit | margin |\n|---|---|---|---:|---:|---:|\n"
    for gate in judged.gates:
        holds = "yes" if gate.status == "pass" else "**no**" if gate.severity == "error" else "no (warns)"
        holds = "not judged" if gate.is_unjudged else holds
        observed = "" if gate.observed is None else format_decisive(gate.observed, gate.limit)
        margin = "" if gate.margin is None else format_decisive(gate.margin, 0)
        cells = [_format_code(gate.id), holds, _format_code(gate.require), observed, format_exact(gate.limit), margin]
        yield f"| {' | '.join(cells)} |\n"
    for gate in judged.gates:
        layers = [violation for violation in gate.violations if violation.layer is not None]
        if gate.status == "fail" and not has_only_numbers(gate):
            reason = f", because: {_format_code(gate.reason)}" if gate.reason else ""
            yield f"\n{_format_code(gate.message)}{reason}\n\n"
            if len(layers) > 1:  # the message names a single layer
                listed = (describe_violation(violation, gate.limit) for violation in layers[:MAX_LAYERS])
                yield from (f"- {_format_code(line)}\n" for line in listed)
            if len(layers) > MAX_LAYERS:
                yield f"- and {len(layers) - MAX_LAYERS:,} more\n"
        if gate.waived:
            yield f"\n{_format_code(gate.id)}, waived:\n\n"
            yield from (
                f"- {_format_code(describe_violation(violation, gate.limit))}\n"
                for violation in gate.waived[:MAX_LAYERS]
            )
    yield "\n"


def _format_code(text: str) -> str:
    return format_code(text, MAX_SENTENCE_LENGTH)
