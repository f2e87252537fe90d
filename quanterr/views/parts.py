"""Parts of a view that all documents share: the verdict, doubts about it, and how the document was made."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quanterr.documents.base import Finding, Model
from quanterr.documents.document import Document
from quanterr.documents.gate_results import Reason
from quanterr.documents.subjects import name_candidates
from quanterr.metrics.scores import Score, list_columns
from quanterr.outputs.formatting import UNDEFINED, format_db, format_percent, list_doubts
from quanterr.outputs.markdown import shorten_path
from quanterr.outputs.sections import (
    LAYERS,
    PAGE,
    CellColumn,
    Column,
    FactList,
    Facts,
    Maps,
    PageScripts,
    Section,
    Table,
    View,
)
from quanterr.util.text import count, size


def make_view(
    document: Document,
    heading: str,
    conclusion: str,
    facts: Facts,
    sections: Iterable[Section],
    about: str,
    maps: Maps | PageScripts | None = None,
    reasons: Sequence[Reason] = (),
    done: str = "",
    settings: Sequence[tuple[str, str]] = (),
    summary: Sequence[str] = (),
    stated: Sequence[Finding] = (),
    overview: Table | None = None,
    title: str = "",
) -> View:
    """Return the view of a document, with its non-empty sections, and sections about all layers and about the run.

    ``done`` is the word for a pass without gates, ``settings`` are facts about the run; the other arguments are fields
    of the view. All layers are shown only if there are maps.
    """
    verdict = getattr(document, "verdict", None)
    every = (*sections, *([LAYERS] if maps else []), _describe_run(document, settings))
    shown = [section for section in every if section.parts]
    done = "" if getattr(document, "gates", ()) else done
    judged = getattr(document, "candidates", [document]) if verdict else []
    doubts: dict[str, list[str]] = {}
    for candidate in judged:
        for message in list_doubts(verdict or "", getattr(candidate, "findings", ())):
            doubts.setdefault(message, []).append(getattr(candidate, "name", ""))
    whose = {
        text: f"{name_candidates(names, len(judged))}: " if len(judged) > 1 else "" for text, names in doubts.items()
    }
    made_by = document.made_by
    answer = (heading, verdict, conclusion, reasons)
    return View(
        *answer,
        facts,
        shown,
        about,
        made_by,
        maps,
        done,
        [f"{whose[text]}{text}" for text in doubts],
        summary,
        stated,
        overview,
        title,
    )


def pick_columns(table: Table, max_rank: int = 6) -> Table:
    """Return a table without title, and without the columns of a rank above ``max_rank``, the less important ones."""
    kept = [n for n, column in enumerate(table.columns) if column.rank <= max_rank]
    rows = [[row[0], *(row[n + 1] for n in kept)] for row in table.rows]
    return Table("", table.first, [table.columns[n] for n in kept], rows)


def find_best(points: Sequence[tuple[int, float]]) -> list[bool]:
    """Return which of several points (size, error) are Pareto-optimal."""
    return [
        not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
        for point in points
    ]


def list_number_columns(
    model: type[Model], find_instance: Callable[[Any], Any] = lambda item: item, otherwise: str = "-", digits: int = 4
) -> list[CellColumn[Any]]:
    """Return a column for each number that a class declares for tables, from left to right.

    ``find_instance`` returns the instance of the class in a row's item; ``otherwise`` stands for absent numbers.
    """
    return [
        (
            Column(score.heading, score.column or 0),
            lambda item, score=score: format_score(find_instance(item), score, otherwise, digits),  # type: ignore[misc]
        )
        for score in list_columns(model)
    ]


def format_score(values: Model, declared: Score, otherwise: str = "-", digits: int = 4) -> str:
    """Return a number of a document in its unit; "exact" for an infinite SNR, which means that there is no error."""
    value: float | None = getattr(values, declared.name)
    if value is None:
        infinite = getattr(values, "nonfinite", {}).get(declared.name)
        if infinite == "+inf":  # an SNR without an error, or an error that is too large
            return "exact" if declared.better == "higher" else "infinite"
        return otherwise if infinite is None else UNDEFINED
    if declared.unit == "dB":
        return format_db(value)
    return format_percent(value) if declared.unit == "share" else f"{value:.{digits}g}"


def _describe_run(document: Document, settings: Sequence[tuple[str, str]]) -> Section:
    """Return a section with the command, program, settings, time and machine of the run that made a document."""
    run = document.run
    kernel = f", kernel {run.kernel}" if run.kernel else ""
    facts = [
        ("Command", shlex.join(map(shorten_path, run.command)) if run.command else "from a library"),
        ("Made by", document.made_by),
        *settings,
        ("When", f"{run.started}, in {run.seconds:.1f} s, {size(run.read_bytes)} read"),
        ("Where", f"{run.device}, {count(run.threads, 'thread')}{kernel}"),
        ("With", f"torch {run.torch}, Python {run.python}"),
    ]
    return Section("run", "How it was made", [FactList(facts)], (PAGE,), is_open=False)
