"""The kinds of documents that quanterr writes and reads again."""

import re
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from quanterr.errors import ReportError
from quanterr.report import SCHEMA
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.document import Document

BEGINNING = 200  # bytes, in which a document names itself
_SCHEMA = re.compile(rb'"schema": *"(quanterr\.[a-z_]+)"')


class Kind(NamedTuple):
    """A kind of document: its package has model.py with the class and SCHEMA_VERSION, values.py for rules."""

    package: str
    name: str

    @property
    def values(self) -> ModuleType:
        """What rules may name in it, and see of it: see report/subjects.py."""
        return import_module(f"{self.package}.values")


KINDS = {
    SCHEMA: Kind("quanterr.report", "Report"),
    "quanterr.ranking": Kind("quanterr.report.ranking", "Ranking"),
    "quanterr.evaluation": Kind("quanterr.report.evaluation", "Evaluation"),
    "quanterr.plan": Kind("quanterr.report.plan", "Plan"),
    "quanterr.inspection": Kind("quanterr.report.inspection", "Inspection"),
}


def schema_of(path: str) -> str:
    """The schema that a file names at its beginning, a report's where it names none: its reader says what is wrong."""
    try:
        with open(path, "rb") as file:
            found = _SCHEMA.search(file.read(BEGINNING))
    except (OSError, ValueError):
        return SCHEMA
    return found[1].decode() if found else SCHEMA


def kind_of(path: str) -> Kind:
    """The kind of document that a file says it is.

    Raises:
        ReportError: one that is not read again.
    """
    schema = schema_of(path)
    if schema not in KINDS:
        known = ", ".join(KINDS)
        raise ReportError(f"{display(path)}: is a {schema}, which is not read again; give one of {known}")
    return KINDS[schema]


def read_document(path: str) -> "Document":
    """Read a report, ranking, evaluation, plan or inspection.

    Raises:
        ReportError: no such file, none of these, a schema version that this quanterr does not know, a wrong value.
    """
    kind = kind_of(path)
    if kind == KINDS[SCHEMA]:
        from quanterr.report.reading import read_report

        return read_report(path)
    from quanterr.report.stored import read_stored

    model = import_module(f"{kind.package}.model")
    document: type[Document] = getattr(model, kind.name)
    return read_stored(path, document, model.SCHEMA, model.SCHEMA_VERSION)
