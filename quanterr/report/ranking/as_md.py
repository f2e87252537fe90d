"""The ranking as a section of a model card, between the comments of a report's. Names are hostile: see markdown.py."""

from collections.abc import Iterator
from typing import IO

from quanterr.report.as_md import BEGIN, END, MAX_LISTED
from quanterr.report.formatting import db, number
from quanterr.report.markdown import code, prose, table
from quanterr.report.ranking.as_table import conclusion
from quanterr.report.ranking.cells import STUDY_TITLE, has_speeds, margin, speed, study_cells
from quanterr.report.ranking.model import Candidate, Ranking
from quanterr.util.text import count, size


def write(ranking: Ranking, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write("\n".join([BEGIN, *_lines(ranking), END]) + "\n")


def _lines(ranking: Ranking) -> Iterator[str]:
    yield "## Quantized candidates"
    yield ""
    yield f"**Verdict: {ranking.verdict}**: {prose(conclusion(ranking))}"
    yield ""
    yield from (f"- {prose(reason)}" for reason in ranking.reasons[:MAX_LISTED])
    yield f"- original: {code(ranking.original)}, {size(ranking.original_bytes)}"
    yield ""
    heads = ["candidate", "rank", "front", "size", "bits/weight", "SNR", "excess", "worst"]
    rows = [_row(candidate) for candidate in ranking.candidates]
    if has_speeds(ranking):
        heads.append("tokens/s at most")
        rows = [[*row, speed(own.tokens_per_second)] for row, own in zip(rows, ranking.candidates, strict=True)]
    yield from table(heads, rows)
    if ranking.studies:
        heads, rows = study_cells(ranking)
        yield from ("", f"{STUDY_TITLE}:", "")
        yield from table(["candidate", *heads], [[code(name), *cells] for name, *cells in rows])
    for swaps in (*ranking.kept, *ranking.swaps):
        yield ""
        yield f"{code(swaps.candidate)} with {count(len(swaps.layers), 'other layer')}:"
        yield ""
        rows = [
            [code(s.layer_name), code(s.take_from or "the original"), f"{s.bytes_change:+,}"]
            for s in swaps.layers[:MAX_LISTED]
        ]
        more = len(swaps.layers) - len(rows)
        yield from table(["layer", "take from", "bytes"], [*rows, *([[f"and {more:,} more", "", ""]] if more else [])])
    what = "the weights" if ranking.sample is None else f"{100 * ranking.sample:g} % of the rows of the weights"
    yield ""
    yield (
        f"Made by {prose(ranking.tool.name)} {prose(ranking.tool.version)} from {what} of all checkpoints. "
        "SNR is 10·log10(Σx²/Σe²) in dB over the layers that differ in at least one candidate. "
        "Weight error is not task accuracy."
    )


def _row(candidate: Candidate) -> list[str]:
    if candidate.rank is None:
        return [
            code(candidate.name),
            prose(candidate.not_ranked or ""),
            "",
            size(candidate.checkpoint_bytes),
            *[""] * 4,
        ]
    worst = candidate.worst_layer
    return [
        code(candidate.name),
        f"{candidate.rank}",
        "yes" if candidate.on_front else "no",
        size(candidate.bytes or 0),
        number(candidate.bits_per_weight),
        "identical" if not candidate.squared_error else db(candidate.snr_db) + margin(candidate.snr_db_margin),
        "–" if candidate.excess_db is None else db(candidate.excess_db),
        "–" if worst is None else db(worst.snr_db),
    ]
