"""The table of runtimes that load a checkpoint, or do not."""

from collections.abc import Iterator, Sequence

from quanterr.documents.loading import Loading
from quanterr.outputs.sections import CellColumn, Column, Name, Section, Table, fill

LOADING: Sequence[CellColumn[Loading]] = (
    (Column("read", 1, right=False), lambda one: one.version),
    (Column("verdict", 0, right=False), str),
    (Column("first reason", 0, right=False), lambda one: one.reasons[0].message if one.reasons else "-"),
)
TITLE = "Whether it loads"


def make_loading_section(loading: Sequence[Loading]) -> Iterator[Section]:
    """Yield the section, if any runtime was asked for."""
    if loading:
        runtimes = [(Name(one.runtime), one) for one in loading]
        table = Table(f"{TITLE}, tested statically", "program", *fill(LOADING, runtimes), is_asked_for=True)
        yield Section("loading", TITLE, [table])
