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
    told: Sequence[Finding] = (),
    overview: Table | None = None,
    title: str = "",
) -> View:
    """Return the view of a document: its non-empty sections, the table of all layers if there are maps, and its run.

    ``done`` is the word for a pass without gates, ``settings`` are facts about the run; the other arguments are fields
    of the view.
    """
    verdict = getattr(document, "verdict", None)
    every = (*sections, *([LAYERS] if maps else []), _describe_run(document, settings))
    shown = [section for section in every if section.parts]
    done = "" if getattr(document, "gates", ()) else done
    judged = getattr(document, "candidates", [document]) if verdict else []
    doubts: dict[str, list[str]] = {}
    for one in judged:
        for message in list_doubts(verdict or "", getattr(one, "findings", ())):
            doubts.setdefault(message, []).append(getattr(one, "name", ""))
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
        told,
        overview,
        title,
    )


def pick_columns(table: Table, most: int = 6) -> Table:
    """Return a table without its title and the columns of a rank above ``most``, which narrow terminals drop first."""
    kept = [n for n, column in enumerate(table.columns) if column.rank <= most]
    rows = [[row[0], *(row[n + 1] for n in kept)] for row in table.rows]
    return Table("", table.first, [table.columns[n] for n in kept], rows)


def find_best(points: Sequence[tuple[int, float]]) -> list[bool]:
    """Return which of several points (size, error) are Pareto-optimal."""
    return [not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in points) for own in points]


def list_number_columns(
    kind: type[Model], of: Callable[[Any], Any] = lambda item: item, otherwise: str = "-", digits: int = 4
) -> list[CellColumn[Any]]:
    """Return a column for each number that a class declares for tables, from left to right.

    ``of`` returns the instance of an item that a row shows; ``otherwise`` stands for numbers that do not exist.
    """
    return [
        (
            Column(one.heading, one.column or 0),
            lambda item, one=one: format_score(of(item), one, otherwise, digits),  # type: ignore[misc]
        )
        for one in list_columns(kind)
    ]


def format_score(values: Model, declared: Score, otherwise: str = "-", digits: int = 4) -> str:
    """Return a number of a document in its unit; "exact" for an infinite SNR, as one without an error is."""
    value: float | None = getattr(values, declared.name)
    if value is None:
        infinite = getattr(values, "nonfinite", {}).get(declared.name)
        if infinite == "+inf":  # without an error, only what is better if higher is infinite
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
