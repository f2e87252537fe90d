"""The report as a section of a model card, between two comments, so that the next one can take its place.

Names are hostile: see markdown.py.
"""

from collections.abc import Iterator
from typing import IO

from quanterr.errors import UsageError
from quanterr.report.card import BEGIN, END, MAX_LISTED
from quanterr.report.formatting import (
    BUCKETS,
    cosine,
    coverage_line,
    db,
    gate_words,
    judged,
    number,
    of_scales,
    percent,
    worst_layers,
)
from quanterr.report.markdown import code, prose, table
from quanterr.report.model import Report, Side
from quanterr.util.text import count, size

WORST = 5  # layers


def write(report: Report, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write(section(report))


def section(report: Report) -> str:
    """The section, with its comments."""
    return "\n".join([BEGIN, *_lines(report), END]) + "\n"


def updated(text: str, report: Report, where: str, append: bool = False) -> str:
    """A document with the section in the place of what stood between its comments.

    ``append``: at the end of a document that has no such comments.

    Raises:
        UsageError: not exactly one pair of comments, each on a line of its own.
    """
    lines = text.splitlines(keepends=True)
    found = [(n, mark) for n, line in enumerate(lines) if (mark := line.strip("\ufeff \t\r\n")) in (BEGIN, END)]
    if not found and append:
        return _appended(text, report)
    if not found:
        raise UsageError(
            f"{where}: has no place for the report; give --append to put it at the end, or add two lines where it "
            f"belongs: {BEGIN} and {END}"
        )
    if [mark for _, mark in found] != [BEGIN, END]:
        description = ", ".join(f"line {n + 1}: {mark}" for n, mark in found)
        raise UsageError(
            f"{where}: needs {BEGIN} once and {END} once after it, each on its own line; it has {description}"
        )
    first, last = found[0][0], found[1][0]
    newline = "\r\n" if lines[first].endswith("\r\n") else "\n"
    before = "".join(lines[:first]) + ("\ufeff" if lines[first].startswith("\ufeff") else "")
    ending = "" if lines[last].endswith("\n") else newline
    made = section(report).replace("\n", newline)
    return before + (made.removesuffix(newline) if ending else made) + "".join(lines[last + 1 :])


def _appended(text: str, report: Report) -> str:
    """With a blank line before the section, and line ends as they are there."""
    newline = "\r\n" if "\r\n" in text else "\n"
    ends = "" if not text or text.endswith("\n") else newline
    return f"{text}{ends}{newline if text else ''}{section(report).replace(chr(10), newline)}"


def _lines(report: Report) -> Iterator[str]:
    a = report.aggregate
    yield "## Weight fidelity"
    yield ""
    yield f"**Verdict: {report.verdict}**"
    yield ""
    yield from (f"- {prose(reason)}" for reason in report.reasons[:MAX_LISTED])
    if len(report.reasons) > MAX_LISTED:
        yield f"- and {count(len(report.reasons) - MAX_LISTED, 'more reason')}"
    yield f"- {prose(coverage_line(report))}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| quantized | {_described(report.quantized)} |"
    yield f"| original | {_described(report.original)} |"
    if report.layers:
        yield f"| SNR, pooled | {db(a.overall_snr_db, ' dB')} over {count(a.total_layers, 'layer')} that differ |"
        yield f"| worst layer | {db(a.worst_layer_snr_db, ' dB')} |"
        yield f"| relative error | {percent(a.mean_relative_error)} |"
        yield f"| cosine | {cosine(a.cosine_similarity)} |"
        yield f"| bits per weight | {number(a.bits_per_weight)} |"
        yield ""
        yield from table(
            ["format", "layers", "SNR", "attainable", "excess", "worst", "relative", "bits/weight"], _formats(report)
        )
        yield ""
        yield "Worst layers:"
        yield ""
        yield from table(["layer", "SNR", "excess", "relative", "max error", "format"], _worst(report))
    yield from _problems(report)
    yield from _gates(report)
    yield ""
    yield (
        f"Made by {prose(report.tool.name)} {prose(report.tool.version)} from the weights of both checkpoints. SNR is "
        "10·log10(Σx²/Σe²) in dB, x the original and e the error; attainable is that of the nearest codes with the "
        "stored scales, excess what is lost beyond. Weight error is not task accuracy."
    )


def _described(side: Side) -> str:
    revision = f" at {code(side.revision)}" if side.revision else ""
    return f"{code(side.path)}{revision}, {size(side.bytes)}"


def _formats(report: Report) -> Iterator[list[str]]:
    for name, a in report.groups.get("format", {}).items():
        allowed = [of_scales(a, key, "–") for key in ("attainable_snr_db", "excess_db")]
        levels = [db(a.overall_snr_db), *allowed, db(a.worst_layer_snr_db)]
        yield [code(name), f"{a.total_layers:,}", *levels, percent(a.mean_relative_error), number(a.bits_per_weight)]


def _worst(report: Report) -> Iterator[list[str]]:
    for name, layer in worst_layers(report.layers, WORST):
        levels = [db(layer.snr_db), of_scales(layer, "excess_db", "–")]
        errors = [*levels, percent(layer.relative_error), number(layer.max_absolute_error)]
        yield [code(name), *errors, code(layer.format)]


def _problems(report: Report) -> Iterator[str]:
    if not report.not_compared:
        return
    yield ""
    yield f"Not compared: {count(len(report.not_compared), 'tensor')}:"
    yield ""
    rows = [
        [code(item.layer_name), prose(BUCKETS.get(item.bucket, item.bucket)), prose(item.reason)]
        for item in report.not_compared[:MAX_LISTED]
    ]
    more = len(report.not_compared) - len(rows)
    yield from table(["tensor", "why", "in detail"], [*rows, *([[f"and {more:,} more", "", ""]] if more else [])])


def _gates(report: Report) -> Iterator[str]:
    if not report.gates:
        return
    yield ""
    rows = [
        [
            prose(gate.id) if gate.id != gate.require else "",
            code(gate.require),
            gate_words(gate)[0],
            judged(gate.observed, gate.limit),
            judged(gate.margin, 0),
        ]
        for gate in sorted(report.gates, key=lambda gate: gate.status)
    ]
    yield from table(["gate", "condition", "verdict", "observed", "margin"], rows)
