"""The report as a section of a model card: see card.py.

Names are hostile: see markdown.py.
"""

from collections.abc import Iterator
from typing import IO

from quanterr.report.card import BEGIN, END, MAX_LISTED
from quanterr.report.formatting import cosine, db, doubts, gate_words, judged, number, percent
from quanterr.report.layers import BUCKETS, coverage_line, of_scales, word_of, worst_layers
from quanterr.report.markdown import code, located, of_verdict, prose, table
from quanterr.report.model import Report, Side
from quanterr.util.text import count, size

WORST = 5  # layers


def write(report: Report, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write(section(report))


def section(report: Report) -> str:
    """The section, with its comments."""
    return "\n".join([BEGIN, *_lines(report), END]) + "\n"


def _lines(report: Report) -> Iterator[str]:
    a = report.aggregate
    yield "## Weight fidelity"
    yield ""
    yield f"**{_verdict(report)}**"
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


def _verdict(report: Report) -> str:
    word = word_of(report)
    return of_verdict("" if word == "compared" else word, word, doubts(report.verdict, report.findings))


def _described(side: Side) -> str:
    revision = f" at {code(side.revision)}" if side.revision else ""
    return f"{code(located(side.path))}{revision}, {size(side.bytes)}"


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
