"""What a notebook shows of a report or a ranking: a line of text, a compact table, a data frame."""

import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quanterr.errors import UsageError
from quanterr.report.formatting import SORTS, db, number, of_scales, percent, sort_layers
from quanterr.util.text import count, display, size

if TYPE_CHECKING:
    from quanterr.report.model import Report
    from quanterr.report.ranking.model import Ranking

WORST = 10  # layers of a table
RIGHT = ' style="text-align: right"'


def line_of(report: "Report") -> str:
    """``<quanterr.Report pass: 55 layers, 31.55 dB; a.safetensors, b.safetensors>``."""
    sides = ", ".join(display(os.path.basename(side.path)) for side in (report.original, report.quantized))
    layers = count(len(report.layers), "layer")
    return f"<quanterr.Report {report.verdict}: {layers}, {db(report.aggregate.overall_snr_db, ' dB')}; {sides}>"


def html_of(report: "Report") -> str:
    """The verdict with its reasons, and the worst layers."""
    layers = sort_layers(report.layers)[:WORST]
    rows = [
        (layer.layer_name, layer.format, db(layer.snr_db), of_scales(layer, "excess_db"), percent(layer.relative_error))
        for layer in layers
    ]
    of = f"the {len(layers)} worst of " if len(layers) < len(report.layers) else ""
    title = f"{of}{count(len(report.layers), 'layer')}, by {SORTS['snr'][1]}"
    headers = ("layer", "format", "SNR dB", "excess dB", "relative error")
    return _heading(report.verdict, report.reasons) + (table(title, headers, rows, 2) if rows else "")


def line_of_ranking(ranking: "Ranking") -> str:
    """``<quanterr.Ranking pass: int8, fp8; original.safetensors>``."""
    names = ", ".join(display(candidate.name) for candidate in ranking.candidates)
    return f"<quanterr.Ranking {ranking.verdict}: {names}; {display(os.path.basename(ranking.original))}>"


def html_of_ranking(ranking: "Ranking") -> str:
    """The verdict with its reasons, and the candidates."""
    rows = [
        (
            "-" if candidate.rank is None else str(candidate.rank),
            candidate.name,
            db(candidate.snr_db),
            number(candidate.bits_per_weight),
            "-" if candidate.bytes is None else size(candidate.bytes),
        )
        for candidate in ranking.candidates
    ]
    headers = ("rank", "candidate", "SNR dB", "bits per weight", "size")
    title = f"{count(len(ranking.layers), 'layer')} differ"
    return _heading(ranking.verdict, ranking.reasons) + table(title, headers, rows, 2)


def frame(rows: Iterable[dict[str, Any]]) -> Any:
    """Rows as a pandas.DataFrame.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise UsageError("to_pandas() needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def _heading(verdict: str, reasons: Sequence[str]) -> str:
    said = "; ".join(escape(display(reason, 2000)) for reason in reasons[:3])
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    return f"<p><b>{escape(verdict)}</b>: {said}{more}</p>"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table with a caption. ``words`` columns hold words, the others numbers."""
    align = [""] * words + [RIGHT] * (len(headers) - words)
    head = "".join(f"<th{a}>{escape(header)}</th>" for header, a in zip(headers, align, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{a}>{escape(display(cell))}</td>' for cell, a in zip(row, align, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
