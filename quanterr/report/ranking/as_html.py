"""The ranking as one page: size against error, the map, the candidates, what to change, all layers."""

from collections.abc import Iterator
from typing import IO, Any

from quanterr.report import html_data
from quanterr.report.formatting import db, number, sentence
from quanterr.report.html_data import DB_PLACES, DIFFERS, SAME, SHARE_DIGITS, Row, columns_of, rounded
from quanterr.report.markup import (
    LAYER_SCRIPTS,
    Markup,
    folding,
    headed,
    joined,
    layer_link,
    navigation,
    page,
    part,
    table,
    tag,
)
from quanterr.report.ranking.as_table import conclusion
from quanterr.report.ranking.cells import STUDY_TITLE, has_speeds, margin, speed, study_cells
from quanterr.report.ranking.model import Candidate, Choice, RankedLayer, Ranking, Swaps
from quanterr.roles import role_of
from quanterr.util.text import count, display, size

SCRIPTS = (*LAYER_SCRIPTS, "ranking_front", "ranking")
SECTIONS = (
    ("places", "Map"),
    ("front", "Size and error"),
    ("candidates", "Candidates"),
    ("mix", "What to change"),
    ("layers", "Layers"),
)
MAX_LISTED = 50  # layers of a proposal


def write(ranking: Ranking, file: IO[str]) -> None:
    """Write the page."""
    body = joined(
        headed(ranking.verdict, [conclusion(ranking), *_reasons(ranking)], _original(ranking)),
        navigation(SECTIONS),
        part("map"),
        part("front"),
        folding("candidates", "Candidates", _candidates(ranking)),
        folding("mix", "What to change", _mix(ranking)),
        part("layers"),
    )
    title = f"{ranking.verdict}: {count(len(ranking.candidates), 'candidate')}"
    file.write(page("ranking", title, SCRIPTS, body, page_data(ranking)))


def page_data(ranking: Ranking) -> dict[str, Any]:
    """What the scripts show: all layers, with an SNR for each ranked candidate."""
    ranked = [candidate for candidate in ranking.candidates if candidate.rank is not None]
    total = max((candidate.squared_error or 0.0 for candidate in ranked), default=0.0)
    return {
        **columns_of(_row(layer, total) for layer in ranking.layers),
        "candidates": [
            {
                "name": display(candidate.name),
                "bytes": candidate.bytes,
                "snr_db": candidate.snr_db,
                "on_front": candidate.on_front,
            }
            for candidate in ranked
        ],
        "choices": [
            [[display(c.format), c.bytes, rounded(c.squared_error, html_data.DIGITS)] for c in layer.choices]
            for layer in ranking.layers[: html_data.DETAILED]
        ],
    }


def _row(layer: RankedLayer, total: float) -> Row:
    errors = [choice.squared_error for choice in layer.choices]
    levels = {f"snr_{n}": _level(choice) for n, choice in enumerate(layer.choices)}
    spread = rounded((max(errors) - min(errors)) / total, SHARE_DIGITS) if total else None
    words = {"role": role_of(layer.layer_name), "best": display(layer.best)}
    return Row(layer.layer_name, DIFFERS, words, {"spread": spread, **levels})


def _level(choice: Choice) -> float | str | None:
    if choice.snr_db is not None:
        return round(choice.snr_db, DB_PLACES)
    return None if choice.squared_error else SAME


def _reasons(ranking: Ranking) -> Iterator[str]:
    yield from map(sentence, ranking.reasons)
    yield f"{count(len(ranking.layers), 'layer differs', 'layers differ')} in at least one of them"


def _original(ranking: Ranking) -> Markup:
    path = tag("span", sentence(ranking.original), class_="name")
    return tag("dl", tag("dt", "original"), tag("dd", path, f", {size(ranking.original_bytes)}"), class_="sides")


def _candidates(ranking: Ranking) -> Markup:
    heads = [
        "candidate",
        "rank",
        "front",
        "size",
        "bits/weight",
        "SNR dB",
        "excess dB",
        "worst dB",
        "best in",
        "gates held",
    ]
    rows = [_cells(candidate, len(ranking.layers)) for candidate in ranking.candidates]
    if has_speeds(ranking):
        heads.append("tokens/s at most")
        rows = [[*row, speed(own.tokens_per_second)] for row, own in zip(rows, ranking.candidates, strict=True)]
    lines = [f"{c.name}: {c.behind} is no larger and has no more error" for c in ranking.candidates if c.behind]
    return joined(
        table(heads, rows, "short rows", len(heads) - 1),
        *(tag("p", sentence(line), class_="about") for line in lines),
        *([_studies(ranking)] if ranking.studies else []),
    )


def _studies(ranking: Ranking) -> Markup:
    heads, rows = study_cells(ranking)
    cells = [[display(name), *own] for name, *own in rows]
    return joined(
        tag("p", f"{STUDY_TITLE}:", class_="about"), table(["candidate", *heads], cells, "short rows", len(heads))
    )


def _cells(candidate: Candidate, layers: int) -> list[str]:
    name = display(candidate.name)
    if candidate.rank is None:
        return [name, "not ranked", "–", size(candidate.checkpoint_bytes), *["–"] * 6]
    worst = candidate.worst_layer
    holding = sum(gate.status == "pass" for gate in candidate.gates)
    return [
        name,
        f"{candidate.rank}",
        "yes" if candidate.on_front else "no",
        size(candidate.bytes or 0),
        number(candidate.bits_per_weight),
        db(candidate.snr_db) + margin(candidate.snr_db_margin) if candidate.squared_error else "identical",
        "–" if candidate.excess_db is None else db(candidate.excess_db),
        "–" if worst is None else db(worst.snr_db),
        f"{candidate.best_layers:,} of {layers:,}",
        f"{holding} of {len(candidate.gates)}" if candidate.gates else "–",
    ]


def _mix(ranking: Ranking) -> Markup:
    proposals = [*ranking.swaps, *ranking.kept]
    if not proposals:
        return tag("p", "No layer would gain much from another candidate.", class_="none")
    return joined(*(_proposal(swaps, ranking) for swaps in proposals))


def _proposal(swaps: Swaps, ranking: Ranking) -> Markup:
    own = next(candidate for candidate in ranking.candidates if candidate.name == swaps.candidate)
    before, after = db(own.snr_db), "identical" if swaps.snr_db is None else f"{db(swaps.snr_db)} dB"
    share = 100 * swaps.bytes_change / (own.bytes or 1)
    title = f"{display(swaps.candidate)} with {count(len(swaps.layers), 'layer')} from elsewhere: "
    rows = [
        [
            layer_link(swap.layer_name),
            display(swap.take_from or "the original"),
            display(swap.format),
            f"{swap.bytes_change:+,}",
            f"{100 * swap.squared_error_change / (own.squared_error or 1):+.3g} %",
        ]
        for swap in swaps.layers[:MAX_LISTED]
    ]
    more = len(swaps.layers) - len(rows)
    return joined(
        tag("h3", f"{title}{before} → {after} for {share:+.3g} % bytes"),
        table(["layer", "take from", "format", "bytes", "squared error"], rows, "rows", 2),
        tag("p", f"and {more:,} more, in the JSON", class_="about") if more else Markup(""),
    )
