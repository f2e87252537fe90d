"""The kinds of documents that quanterr writes and can read again."""

import os
import re
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from quanterr.documents.comparison import SCHEMA
from quanterr.documents.packed import open_document
from quanterr.errors import ReportError
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.documents.document import Document

BEGINNING = 200  # bytes at the start of a file that hold the name of its schema
_SCHEMA = re.compile(rb'"schema": *"(quanterr\.[a-z_]+)"')


class DocumentKind(NamedTuple):
    """A kind of document; its package has model.py (its class) and values.py (for rules and diffs)."""

    package: str
    name: str

    @property
    def model(self) -> "type[Document]":
        """The class of the document."""
        return getattr(import_module(f"{self.package}.model"), self.name)  # type: ignore[no-any-return]

    @property
    def values(self) -> ModuleType:
        """The module that gives rules the subjects and metrics of this kind, and diffs its changes; see subjects.py."""
        return import_module(f"{self.package}.values")


FAILURE = "quanterr.failure"  # schema of the file that a run writes if it ends without a result
KINDS = {
    SCHEMA: DocumentKind("quanterr.documents.comparison", "Report"),
    "quanterr.ranking": DocumentKind("quanterr.documents.ranking", "Ranking"),
    "quanterr.evaluation": DocumentKind("quanterr.documents.evaluation", "Evaluation"),
    "quanterr.plan": DocumentKind("quanterr.documents.plan", "Plan"),
    "quanterr.inspection": DocumentKind("quanterr.documents.inspection", "Inspection"),
    "quanterr.images": DocumentKind("quanterr.documents.images", "Images"),
}


def find_kind(path: str) -> DocumentKind:
    """Return the kind of document in a file; a report if the file names no schema, as its reader explains the error.

    Raises:
        ReportError: the file is a checkpoint, a pipe or a device, or holds a document that cannot be read again.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ReportError(
            f"{display(path)}: a pipe or a device, which cannot be read twice; save the result as a file first"
        )
    try:
        with open_document(path, BEGINNING) as file:
            start = file.read(BEGINNING)
    except (OSError, ValueError):
        return KINDS[SCHEMA]
    # GGUF; or safetensors, which begins with a length of eight bytes and then JSON.
    is_json = start[:9].lstrip().startswith((b"{", b"["))
    if start.startswith(b"GGUF") or (start[8:9] == b"{" and not is_json):
        raise ReportError(f"{display(path)}: is a checkpoint, not a report; give the JSON that -o FILE.json wrote")
    match = _SCHEMA.search(start)
    schema = match[1].decode() if match else SCHEMA
    if schema == FAILURE:
        raise ReportError(f"{display(path)}: the run that should have written it ended with an error: run it again")
    if schema not in KINDS:
        known = ", ".join(KINDS)
        raise ReportError(f"{display(path)}: is a {schema}, which is not read again; give one of {known}")
    return KINDS[schema]


def read_document(path: str | os.PathLike[str]) -> "Document":
    """Read a report, ranking, evaluation, plan, inspection or comparison of images.

    Raises:
        ReportError: the file is missing, is not such a document, or has an unknown schema version or an invalid value.
    """
    document_kind = find_kind(os.fspath(path))
    from quanterr.documents.reading import read_report, read_stored

    return read_report(path) if document_kind == KINDS[SCHEMA] else read_stored(path, document_kind.model)
