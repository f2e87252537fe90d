"""The kinds of documents that quanterr writes and can read again."""

import re
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from quanterr.errors import ReportError
from quanterr.report import SCHEMA
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.document import Document

BEGINNING = 200  # bytes at the start of a file that hold the name of its schema
_SCHEMA = re.compile(rb'"schema": *"(quanterr\.[a-z_]+)"')


class DocumentKind(NamedTuple):
    """A kind of document; its package has model.py (class and SCHEMA_VERSION) and values.py (for rules)."""

    package: str
    name: str

    @property
    def values(self) -> ModuleType:
        """The module that shows rules the subjects and metrics of this kind; see report/subjects.py."""
        return import_module(f"{self.package}.values")


KINDS = {
    SCHEMA: DocumentKind("quanterr.report", "Report"),
    "quanterr.ranking": DocumentKind("quanterr.report.ranking", "Ranking"),
    "quanterr.evaluation": DocumentKind("quanterr.report.evaluation", "Evaluation"),
    "quanterr.plan": DocumentKind("quanterr.report.plan", "Plan"),
    "quanterr.inspection": DocumentKind("quanterr.report.inspection", "Inspection"),
    "quanterr.images": DocumentKind("quanterr.report.images", "Images"),
}


def _refuse_checkpoint(path: str) -> None:
    """Raise an error if a file is a checkpoint: its first bytes, or those after eight bytes of length, say so.

    Raises:
        ReportError: it is.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(9)
    except (OSError, ValueError):  # reading the document raises the proper error
        return
    if start.startswith(b"GGUF") or (start[8:] == b"{" and not start.lstrip().startswith((b"{", b"["))):
        raise ReportError(f"{display(path)}: is a checkpoint, not a report; give the JSON that -o FILE.json wrote")


def find_schema(path: str) -> str:
    """Return the schema named at the start of a file; a report's if there is none, as its reader explains the error."""
    try:
        with open(path, "rb") as file:
            found = _SCHEMA.search(file.read(BEGINNING))
    except (OSError, ValueError):
        return SCHEMA
    return found[1].decode() if found else SCHEMA


def find_kind(path: str) -> DocumentKind:
    """Return the kind of document that a file holds.

    Raises:
        ReportError: the file is a checkpoint, or holds a document that cannot be read again.
    """
    _refuse_checkpoint(path)
    schema = find_schema(path)
    if schema not in KINDS:
        known = ", ".join(KINDS)
        raise ReportError(f"{display(path)}: is a {schema}, which is not read again; give one of {known}")
    return KINDS[schema]


def read_document(path: str) -> "Document":
    """Read a report, ranking, evaluation, plan, inspection or comparison of images.

    Raises:
        ReportError: the file is missing, no such document, of an unknown schema version, or has an invalid value.
    """
    kind = find_kind(path)
    if kind == KINDS[SCHEMA]:
        from quanterr.report.reading import read_report

        return read_report(path)
    from quanterr.report.stored import read_stored

    model = import_module(f"{kind.package}.model")
    document: type[Document] = getattr(model, kind.name)
    return read_stored(path, document, model.SCHEMA, model.SCHEMA_VERSION)
