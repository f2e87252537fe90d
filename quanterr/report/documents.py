"""The kinds of documents that quanterr writes and reads again."""

import re
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from quanterr.report import SCHEMA, Output

if TYPE_CHECKING:
    from quanterr.report.model import Document

BEGINNING = 200  # bytes, in which a document names itself
_SCHEMA = re.compile(rb'"schema": *"(quanterr\.[a-z_]+)"')


class Kind(NamedTuple):
    """A kind of document: its package has OUTPUTS, and model.py with the class and SCHEMA_VERSION."""

    package: str
    name: str

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Its outputs."""
        return import_module(self.package).OUTPUTS  # type: ignore[no-any-return]


KINDS = {
    SCHEMA: Kind("quanterr.report", "Report"),
    "quanterr.ranking": Kind("quanterr.report.ranking", "Ranking"),
    "quanterr.evaluation": Kind("quanterr.report.evaluation", "Evaluation"),
    "quanterr.plan": Kind("quanterr.report.plan", "Plan"),
}


def schema_of(path: str) -> str:
    """The schema that a file names at its beginning, a report's where it names none: its reader says what is wrong."""
    try:
        with open(path, "rb") as file:
            found = _SCHEMA.search(file.read(BEGINNING))
    except (OSError, ValueError):
        return SCHEMA
    schema = found[1].decode() if found else SCHEMA
    return schema if schema in KINDS else SCHEMA


def read_document(path: str) -> "Document":
    """A report, a ranking, an evaluation or a plan.

    Raises:
        ReportError: no such file, none of these, a schema version that this quanterr does not know, a wrong value.
    """
    schema = schema_of(path)
    if schema == SCHEMA:
        from quanterr.report.reading import read_report

        return read_report(path)
    from quanterr.report.stored import read_stored

    model = import_module(f"{KINDS[schema].package}.model")
    kind: type[Document] = getattr(model, KINDS[schema].name)
    return read_stored(path, kind, schema, model.SCHEMA_VERSION)
