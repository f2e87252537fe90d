"""The tables of runtimes that load checkpoints, or do not."""

from collections.abc import Iterable, Iterator, Sequence

from quanterr.documents.loading import Loading
from quanterr.outputs.sections import CellColumn, Column, Name, Section, Table, fill
from quanterr.util.text import itemize

LOADING_COLUMNS: Sequence[CellColumn[Loading]] = (
    (Column("read", 1, right=False), lambda result: result.version),
    (Column("verdict", 0, right=False), str),
    (Column("first reason", 0, right=False), lambda result: _format_reason(result)),
)
TITLE = "Whether it loads"
MAX_LISTED_CANDIDATES = 4


def make_loading_section(loading: Sequence[Loading]) -> Iterator[Section]:
    """Yield the section about one checkpoint, if the user has named a runtime (``--for``)."""
    if loading:
        runtimes = [(Name(result.runtime), result) for result in loading]
        table = Table(f"{TITLE}, tested statically", "program", *fill(LOADING_COLUMNS, runtimes), is_asked_for=True)
        yield Section("loading", TITLE, [table])


def make_candidates_section(candidates: Sequence[tuple[str, Sequence[Loading]]]) -> Iterator[Section]:
    """Yield the section about several candidates, given with their names, if the user has named a runtime."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, result in _order_by_runtime(candidates):
        groups.setdefault((result.runtime, str(result), _format_reason(result)), []).append(name)
    if groups:
        columns = [Column("verdict", 0, right=False), Column("candidates", 0, right=False)]
        columns += [Column("first reason", 1, right=False)]
        rows = [
            [Name(runtime), verdict, _list_names(names, len(candidates)), reason]
            for (runtime, verdict, reason), names in groups.items()
        ]
        table = Table(f"{TITLE}, tested statically", "program", columns, rows, is_asked_for=True)
        yield Section("loading", TITLE, [table])


def summarize_candidates(candidates: Sequence[tuple[str, Sequence[Loading]]]) -> Iterator[str]:
    """Yield a line for each runtime that says which candidates it loads."""
    runtimes: dict[str, dict[str, list[str]]] = {}
    for name, result in _order_by_runtime(candidates):
        runtimes.setdefault(f"{result.runtime} ({result.version})", {}).setdefault(str(result), []).append(name)
    for runtime, verdicts in runtimes.items():
        parts = (f"{verdict}: {_list_names(names, len(candidates))}" for verdict, names in verdicts.items())
        yield f"{runtime}: {'; '.join(parts)}"


def _order_by_runtime(candidates: Iterable[tuple[str, Sequence[Loading]]]) -> list[tuple[str, Loading]]:
    results = [(name, result) for name, loading in candidates for result in loading]
    order = list(dict.fromkeys(result.runtime for _, result in results))
    return sorted(results, key=lambda pair: order.index(pair[1].runtime))


def _format_reason(result: Loading) -> str:
    return result.reasons[0].message if result.reasons else "-"


def _list_names(names: Sequence[str], total: int) -> str:
    return "all candidates" if len(names) == total else itemize(names, MAX_LISTED_CANDIDATES)
