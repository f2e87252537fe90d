"""The evaluation as one page: the numbers, the map by output error, the blocks, all weights."""

from collections.abc import Iterator
from typing import IO, Any

from quanterr.report import html_data
from quanterr.report.as_html import finding_item
from quanterr.report.evaluation.model import Evaluated, Evaluation
from quanterr.report.evaluation.wording import CAVEAT, base_line, conclusion, shown, task_cells, worded
from quanterr.report.formatting import gate_words, judged, sentence
from quanterr.report.html_data import DIFFERS, Row, columns_of, rounded
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
from quanterr.roles import role_of
from quanterr.util.text import display, size

SCRIPTS = (*LAYER_SCRIPTS, "evaluation")
SECTIONS = (("places", "Map"), ("scores", "Scores"), ("findings", "Findings"), ("blocks", "Blocks"), ("gates", "Gates"),
            ("layers", "Weights"))  # fmt: skip
MAX_LISTED = 400  # blocks


def write(evaluation: Evaluation, file: IO[str]) -> None:
    """Write the page."""
    body = joined(
        headed(evaluation.verdict, [conclusion(evaluation), *_reasons(evaluation)], _original(evaluation)),
        navigation(SECTIONS),
        part("map"),
        folding("scores", "Scores", scores(evaluation)),
        folding("tasks", "Tasks", _tasks(evaluation)) if any(c.tasks for c in evaluation.candidates) else Markup(""),
        folding("findings", "Findings", findings_of(evaluation) or tag("p", "No findings.", class_="none")),
        folding("gates", "Gates", *_gates(evaluation)),
        folding("blocks", "Hidden states by block", *_blocks(evaluation), is_open=False),
        part("layers"),
    )
    title = f"{evaluation.verdict}: {display(evaluation.candidates[0].name)}"
    file.write(page("evaluation", title, SCRIPTS, body, page_data(evaluation)))


def page_data(evaluation: Evaluation) -> dict[str, Any]:
    """What the scripts show: all weights, with the output error of each candidate."""
    by_name: dict[str, dict[str, Any]] = {}
    blocks: dict[str, str] = {}
    for n, candidate in enumerate(evaluation.candidates):
        for weight in candidate.weights:
            blocks[weight.layer_name] = weight.block
            own = by_name.setdefault(weight.layer_name, {})
            own[f"output_{n}"] = rounded(weight.output_error, html_data.DIGITS)
            own[f"share_{n}"] = rounded(weight.share_of_block, html_data.SHARE_DIGITS)
    rows = [
        Row(name, DIFFERS, {"role": role_of(name), "unit": display(blocks[name])}, numbers)
        for name, numbers in by_name.items()
    ]
    return {**columns_of(rows), "candidates": [display(candidate.name) for candidate in evaluation.candidates]}


def _reasons(evaluation: Evaluation) -> Iterator[str]:
    yield from map(sentence, evaluation.reasons)
    yield base_line(evaluation)


def _original(evaluation: Evaluation) -> Markup:
    path = tag("span", sentence(evaluation.original), class_="name")
    text = tag("span", sentence(evaluation.tokens.source), class_="name")
    return tag(
        "dl", tag("dt", "original"), tag("dd", path, f", {size(evaluation.original_bytes)}"), tag("dt", "text"),
        tag("dd", text), class_="sides",
    )  # fmt: skip


def scores(evaluation: Evaluation) -> Markup:
    """The numbers of each candidate, with what they leave out."""
    columns = shown(evaluation)
    heads = ["candidate", "size", *(title for title, _ in columns)]
    rows = [
        [display(candidate.name), size(candidate.bytes), *(worded(candidate, metric) for _, metric in columns)]
        for candidate in evaluation.candidates
    ]
    found = table(heads, rows, "short rows", len(heads) - 1)
    return joined(found, tag("p", f"{base_line(evaluation)}. {CAVEAT}", class_="about"))


def findings_of(evaluation: Evaluation) -> Markup:
    """What candidates say of their model, or are; nothing where there is none."""
    items = [
        finding_item(found, f"{display(candidate.name)}: ")
        for candidate in evaluation.candidates
        for found in candidate.findings
    ]
    return tag("ul", *items, class_="findings") if items else Markup("")


def _tasks(evaluation: Evaluation) -> Markup:
    heads = ["task", "questions", "original", "accuracy", "agreement", "p"]
    rows = [
        [f"{display(task.name)}, {display(candidate.name)}", *task_cells(task)]
        for candidate in evaluation.candidates
        for task in candidate.tasks
    ]
    return table(heads, rows, "rows", len(heads) - 1)


def _gates(evaluation: Evaluation) -> Iterator[Markup]:
    rows = [
        [f"{display(candidate.name)}: {display(gate.require)}", gate_words(gate)[0],
         judged(gate.observed, gate.limit)]
        for candidate in evaluation.candidates for gate in candidate.gates
    ]  # fmt: skip
    yield table(["gate", "", "observed"], rows, "rows", 1) if rows else tag("p", "No gates set.", class_="none")


def _blocks(evaluation: Evaluation) -> Iterator[Markup]:
    for candidate in evaluation.candidates:
        rows = [list(_block(block.name, block.relative_error, block.cosine)) for block in candidate.blocks[:MAX_LISTED]]
        if rows:
            yield tag("h3", display(candidate.name))
            yield table(["behind", "relative error", "cosine"], rows, "rows", 2)
            yield from _worst(candidate)


def _block(name: str, *values: float | None) -> Iterator[str]:
    yield display(name)
    yield from ("not finite" if value is None else f"{value:.5g}" for value in values)


def _worst(candidate: Evaluated) -> Iterator[Markup]:
    if candidate.weights:
        worst = candidate.weights[0]
        yield tag("p", "The largest output error: ", layer_link(worst.layer_name), class_="about")
