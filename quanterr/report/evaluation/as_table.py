"""The evaluation in the terminal: numbers, blocks, the weights that matter, the answer last."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from quanterr.report.as_table import STYLES, Column, ended, fitted, written
from quanterr.report.evaluation.model import Evaluated, Evaluation
from quanterr.report.evaluation.wording import CAVEAT, base_line, conclusion, nearest, shown, task_cells, worded
from quanterr.util.text import count, display, size

BLOCKS = (Column("relative error", 0), Column("cosine", 1), Column("worst token", 2))
WEIGHTS = (Column("output error", 0), Column("share of block", 1))
TASKS = (Column("questions", 3), Column("original", 1), Column("accuracy", 0), Column("agreement", 2), Column("p", 4))
MAX_BLOCKS = 8
MAX_DETAILED = 2  # candidates


def show(
    evaluation: Evaluation, to: Console, top: int = 10, status: int | None = None, wrote: Sequence[str] = ()
) -> None:
    """Print it, with at most ``top`` weights of each candidate; the last line is the answer."""
    plain = not to.file.isatty() or "utf" not in (to.encoding or "").lower()
    wrap = not to.is_terminal
    to.print(Text(base_line(evaluation)), soft_wrap=wrap)
    to.print()
    metrics = shown(evaluation)
    columns = (Column("size", 9), *(Column(title, n) for n, (title, _) in enumerate(metrics)))
    rows = [
        (candidate.name, [size(candidate.bytes), *(worded(candidate, metric) for _, metric in metrics)])
        for candidate in evaluation.candidates
    ]
    to.print(fitted("Against the original", "candidate", columns, rows, plain, to))
    tasks = [
        (f"{task.name}, {candidate.name}", task_cells(task))
        for candidate in evaluation.candidates
        for task in candidate.tasks
    ]
    if tasks:
        to.print()
        to.print(fitted("Tasks, by log-likelihood", "task", TASKS, tasks, plain, to))
    for candidate in _detailed(evaluation):
        if top and candidate.blocks:
            to.print()
            to.print(fitted(_of(candidate, "Hidden states"), "behind", BLOCKS, _blocks(candidate), plain, to))
        weights = [weight for weight in candidate.weights if weight.output_error][:top]
        if weights:
            to.print()
            found = [
                (w.layer_name, [f"{w.output_error:.4g}", f"{100 * (w.share_of_block or 0):.3g} %"]) for w in weights
            ]
            of = count(len(candidate.weights), "weight")
            title = _of(candidate, f"The {len(weights)} largest output errors of {of}")
            to.print(fitted(title, "weight", WEIGHTS, found, plain, to))
    to.print()
    to.print(Text(CAVEAT, style="dim"), soft_wrap=wrap)
    for candidate in evaluation.candidates:
        for gate in candidate.gates:
            to.print(Text(f"{candidate.name}: {gate.message}"), soft_wrap=wrap)
        for one in candidate.findings:
            told = f"{one.severity}: {display(candidate.name)}: {display(one.message, 2000)}"
            to.print(Text(told, style=STYLES["inconclusive"]), soft_wrap=wrap)
    for reason in evaluation.reasons if evaluation.verdict == "inconclusive" else ():
        to.print(Text(display(reason, 2000), style=STYLES["inconclusive"]), soft_wrap=wrap)
    answer = ended(evaluation.verdict, status, conclusion(evaluation) + written(wrote))
    to.print(Text(answer, style=STYLES[evaluation.verdict]), soft_wrap=wrap)


def _detailed(evaluation: Evaluation) -> Sequence[Evaluated]:
    """Whose blocks and weights are shown: of many candidates that of the nearest alone."""
    best = nearest(evaluation)
    return evaluation.candidates if len(evaluation.candidates) <= MAX_DETAILED or best is None else [best]


def _of(candidate: Evaluated, title: str) -> str:
    return f"{title}, {display(candidate.name)}"


def _blocks(candidate: Evaluated) -> list[tuple[str, list[str]]]:
    """Evenly chosen blocks, with the first and the last."""
    blocks, n = candidate.blocks, min(len(candidate.blocks), MAX_BLOCKS)
    places = sorted({round(k * (len(blocks) - 1) / max(n - 1, 1)) for k in range(n)})
    rows = []
    for place in places:
        block = blocks[place]
        cells = (block.relative_error, block.cosine, block.worst_token_error)
        rows.append((block.name, ["not finite" if cell is None else f"{cell:.5g}" for cell in cells]))
    return rows
