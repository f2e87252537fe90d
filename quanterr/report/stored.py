"""Strict reader of all stored documents except reports; needs no torch."""

from typing import TypeVar

from pydantic import ValidationError

from quanterr.errors import ReportError
from quanterr.report import checksum
from quanterr.report.document import Document
from quanterr.report.reading import describe_error
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display

Kind = TypeVar("Kind", bound=Document)


def read_json(path: str) -> tuple[bytes, JsonObject]:
    """Return the bytes of a file and its JSON object, which is empty if it holds another value.

    Raises:
        ReportError: the file is missing, or not strict JSON.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read()
        return raw, as_object(strict_json.loads(raw))
    except OSError as error:
        raise ReportError(f"{display(path)}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{display(path)}: {display(str(error), 200)}") from error


def read_stored(path: str, kind: type[Kind]) -> Kind:
    """Read a document of the given kind; warn on stderr if it was edited or has no checksum.

    Raises:
        ReportError: the file is missing, of another schema or an unknown schema version, or has an invalid value.
    """
    where = display(path)
    schema, version = (kind.model_fields[name].default for name in ("schema_", "schema_version"))
    raw, own = read_json(path)
    if own.get("schema") != schema or str(own.get("schema_version", "")).split(".")[0] != version.split(".")[0]:
        raise ReportError(f"{where}: not a {schema} of schema version {version}")
    if not checksum.is_unedited(raw):
        checksum.warn(where, checksum.EDITED if "checksum" in own else checksum.UNCHECKED)
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise ReportError(f"{where}: {describe_error(error, 'make it again')}") from error
