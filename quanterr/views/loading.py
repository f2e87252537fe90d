"""The tables of runtimes that load checkpoints, or do not."""

from collections.abc import Iterable, Iterator, Sequence

from quanterr.documents.loading import Loading
from quanterr.outputs.sections import CellColumn, Column, Name, Section, Table, fill
from quanterr.util.text import listed

LOADING: Sequence[CellColumn[Loading]] = (
    (Column("read", 1, right=False), lambda one: one.version),
    (Column("verdict", 0, right=False), str),
    (Column("first reason", 0, right=False), lambda one: _format_reason(one)),
)
TITLE = "Whether it loads"
FEW = 4  # candidates that a line names


def make_loading_section(loading: Sequence[Loading]) -> Iterator[Section]:
    """Yield the section, if any runtime was asked for."""
    if loading:
        runtimes = [(Name(one.runtime), one) for one in loading]
        table = Table(f"{TITLE}, tested statically", "program", *fill(LOADING, runtimes), is_asked_for=True)
        yield Section("loading", TITLE, [table])


def make_candidates_section(candidates: Sequence[tuple[str, Sequence[Loading]]]) -> Iterator[Section]:
    """Yield the section of several named candidates, if any runtime was asked for."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, one in _order_by_runtime(candidates):
        groups.setdefault((one.runtime, str(one), _format_reason(one)), []).append(name)
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
    """Yield for each runtime which candidates it loads, and which it does not."""
    runtimes: dict[str, dict[str, list[str]]] = {}
    for name, one in _order_by_runtime(candidates):
        runtimes.setdefault(f"{one.runtime} ({one.version})", {}).setdefault(str(one), []).append(name)
    for runtime, verdicts in runtimes.items():
        found = (f"{verdict}: {_list_names(names, len(candidates))}" for verdict, names in verdicts.items())
        yield f"{runtime}: {'; '.join(found)}"


def _order_by_runtime(candidates: Iterable[tuple[str, Sequence[Loading]]]) -> list[tuple[str, Loading]]:
    every = [(name, one) for name, loading in candidates for one in loading]
    order = list(dict.fromkeys(one.runtime for _, one in every))
    return sorted(every, key=lambda pair: order.index(pair[1].runtime))


def _format_reason(one: Loading) -> str:
    return one.reasons[0].message if one.reasons else "-"


def _list_names(names: Sequence[str], every: int) -> str:
    return "all candidates" if len(names) == every else listed(names, FEW)
