"""The evaluation as a section of a model card, between the comments of a report's. Names are hostile: markdown.py."""

from collections.abc import Iterator
from typing import IO

from quanterr.report.as_md import BEGIN, END, MAX_LISTED
from quanterr.report.evaluation.model import Evaluation
from quanterr.report.evaluation.wording import CAVEAT, base_line, conclusion, shown, task_cells, worded
from quanterr.report.markdown import code, prose, table
from quanterr.util.text import size

WORST = 5  # weights


def write(evaluation: Evaluation, file: IO[str]) -> None:
    """Write the section, with its comments."""
    file.write("\n".join([BEGIN, *_lines(evaluation), END]) + "\n")


def _lines(evaluation: Evaluation) -> Iterator[str]:
    yield "## Quality"
    yield ""
    yield f"**Verdict: {evaluation.verdict}**: {prose(conclusion(evaluation))}"
    yield ""
    yield from (f"- {prose(reason)}" for reason in evaluation.reasons[:MAX_LISTED])
    yield f"- original: {code(evaluation.original)}, {size(evaluation.original_bytes)}"
    yield f"- {prose(base_line(evaluation))}"
    yield ""
    columns = shown(evaluation)
    rows = [
        [code(candidate.name), size(candidate.bytes), *(prose(worded(candidate, metric)) for _, metric in columns)]
        for candidate in evaluation.candidates
    ]
    yield from table(["candidate", "size", *(title for title, _ in columns)], rows)
    findings = [
        [code(candidate.name), found.severity, prose(found.message)]
        for candidate in evaluation.candidates
        for found in candidate.findings
    ]
    if findings:
        yield ""
        yield from table(["candidate", "finding", "in detail"], findings)
    tasks = [
        [prose(task.name), code(candidate.name), *map(prose, task_cells(task))]
        for candidate in evaluation.candidates
        for task in candidate.tasks
    ]
    if tasks:
        yield ""
        yield from table(["task", "candidate", "questions", "original", "accuracy", "agreement", "p"], tasks)
    for candidate in evaluation.candidates:
        worst = [weight for weight in candidate.weights if weight.output_error is not None][:WORST]
        if worst:
            yield ""
            yield f"Largest output errors of {code(candidate.name)}:"
            yield ""
            yield from table(["weight", "output error"], [[code(w.layer_name), f"{w.output_error:.4g}"] for w in worst])
    yield ""
    yield f"Made by {prose(evaluation.tool.name)} {prose(evaluation.tool.version)}. {CAVEAT}"
