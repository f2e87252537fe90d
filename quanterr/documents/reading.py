"""Strict reader of stored documents, without torch.

A document whose checksum matches has no duplicate keys and no NaN, because its writer cannot produce them. It is read
in blocks of lines, so that memory never holds a large file as text. Any other document (edited, merged, processed by
jq) is read whole and searched for them first, which takes longer.
"""

import os
import re
from collections import Counter
from collections.abc import Collection
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import DecodeError, Struct, defstruct
from msgspec.structs import fields, replace

from quanterr.documents.base import Model
from quanterr.documents.checksum import EDITED, UNCHECKED, check_blocks, is_unedited, warn
from quanterr.documents.comparison import FINGERPRINT, LISTS, NORM
from quanterr.documents.comparison.layer import Layer, LosslessLayer
from quanterr.documents.comparison.model import Report
from quanterr.documents.document import Document
from quanterr.documents.packed import open_document
from quanterr.errors import ReportError
from quanterr.metrics.scores import Count
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import display

MAX_MESSAGE_LENGTH = 1000  # characters
MAKE_AGAIN = "make it again with this version"
TENSOR_LISTS = ("layers", "other_changes", "lossless")  # lists of tensors; no name is in two of them
IDENTITY_FIELDS = ("layer_name", "tensor_elements", "finite", "nonfinite")  # always read for each layer
WORDS = {"float": "a number", "int": "an integer", "str": "a text", "bool": "true or false"}
WORDS |= {"array": "a list", "object": "an object", "null": "null"}

Kind = TypeVar("Kind", bound=Document)


class _Records(Model):
    records: defstruct("Records", [(key, Count) for key in LISTS])  # type: ignore[valid-type] # number of items


def read_report(path: str | os.PathLike[str], metrics: Collection[str] | None = None, *, judged: bool = True) -> Report:
    """Read a report.

    Args:
        path: the JSON file.
        metrics: names of metrics and other fields, such as "format"; if given, layers have only these, besides their
            name, their size and the fields about values that are not finite. This takes half the time.
        judged: whether to check that the stored verdict follows from the content; gates reach their own verdict.

    Raises:
        ReportError: the file is missing, truncated or not a report; its schema version is unknown; it has a wrong type,
            NaN, infinity or a duplicate key; or it contradicts itself.
    """
    report, rest = _read(path, Report if metrics is None else _select_metrics(frozenset(metrics)))
    where = display(os.fspath(path))
    _check(report, _decode(rest, _Records, where).records, where)
    if judged:
        _check_verdict(report, where)
    return report


def read_stored(path: str | os.PathLike[str], model: type[Kind]) -> Kind:
    """Read a document of the given kind; warn on stderr if it was edited or has no checksum.

    Raises:
        ReportError: the file is missing, has another schema or an unknown schema version, or holds an invalid value.
    """
    return _read(path, model)[0]


def read_json(path: str | os.PathLike[str]) -> tuple[bytes, JsonObject]:
    """Return the bytes of a file and its JSON object, which is empty if it holds another value.

    Raises:
        ReportError: the file is missing, or not strict JSON.
    """
    where = display(os.fspath(path))
    try:
        with open_document(path) as file:
            raw = file.read()
    except FileNotFoundError as error:
        raise ReportError(f"{where}: no such file") from error
    except IsADirectoryError as error:
        raise ReportError(f"{where}: this is a folder; give the report.json in it") from error
    except (OSError, ValueError) as error:
        raise ReportError(f"{where}: {getattr(error, 'strerror', None) or error}") from error
    if not raw.strip():
        raise ReportError(f"{where}: empty file")
    try:
        return raw, as_object(strict_json.loads(raw))
    except strict_json.InvalidJson as error:
        raise ReportError(f"{where}: {display(str(error))}; truncated, edited or not a document") from error


def require_unedited(path: str | os.PathLike[str]) -> None:
    """Check that nobody edited a document after quanterr wrote it.

    Raises:
        ReportError: the file cannot be read, is not strict JSON, or was edited.
    """
    raw, document = read_json(path)
    if not is_unedited(raw):
        why = EDITED if "checksum" in document else UNCHECKED
        raise ReportError(f"{display(os.fspath(path))}: {why}; --strict-warnings accepts no such file")


@cache
def _select_metrics(metrics: frozenset[str]) -> type[Report]:
    """Return the class of reports whose layers have these metrics, such as "absolute_error_percentiles.p99"."""
    names = {*IDENTITY_FIELDS, *(name.partition(".")[0] for name in metrics)}
    if NORM in names:  # callers need the norm to recognize the original
        names.add(FINGERPRINT)
    weights: Any = _select_fields(Layer, names)
    same: Any = _select_fields(LosslessLayer, names | {"bits_per_weight", NORM})
    lists: Any = zip(TENSOR_LISTS, (list[weights], list[weights], list[same]), strict=True)
    return defstruct("Report", lists, bases=(Report,), kw_only=True)  # type: ignore[return-value]


def _select_fields(struct: type[Struct], names: Collection[str]) -> type[Struct]:
    selected = [field for field in fields(struct) if field.name in names]
    chosen = [(field.name, field.type, *([] if field.required else [field.default])) for field in selected]
    return defstruct(struct.__name__, chosen, bases=(Model,), kw_only=True)


def _read(path: str | os.PathLike[str], model: type[Kind]) -> tuple[Kind, bytes]:
    """Return a document and its JSON, which may lack the items of lists."""
    where = display(os.fspath(path))
    schema, version = (field.default for field in fields(model)[:2])
    major = version.partition(".")[0]
    try:
        return _read_blocks(path, model, f'{{\n"schema": "{schema}",\n"schema_version": "{major}.'.encode())
    except (OSError, ValueError, DecodeError, RecursionError):  # edited or invalid: reading the whole yields the reason
        pass
    raw, document = read_json(path)
    noun = model.__name__.lower()
    if document.get("schema") != schema:
        raise ReportError(f'{where}: not a {noun} of quanterr (its "schema" is not "{schema}")')
    stated = document.get("schema_version")
    if not isinstance(stated, str) or not re.fullmatch(rf"{major}\.\d+", stated):
        shown = display(str(stated), 40)
        raise ReportError(f"{where}: {noun} schema {shown}, this version reads {major}.x; {MAKE_AGAIN}")
    if not is_unedited(raw):
        warn(where, EDITED if "checksum" in document else UNCHECKED)
    return _decode(raw, model, where), raw


def _read_blocks(path: str | os.PathLike[str], model: type[Kind], head: bytes) -> tuple[Kind, bytes]:
    """Read a document as quanterr writes it: each item of a list is on a line of its own.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not as quanterr writes it, or has an invalid value.
    """
    if not os.path.isfile(path):
        raise ValueError("not a regular file: it may not be readable twice")
    hints = get_type_hints(model)
    readers = {key: msgspec.json.Decoder(hints[key]).decode for key in model.ITEMS}
    items: dict[str, list[Any]] = {key: [] for key in readers}
    rest, key = [], ""
    with open_document(path) as file:
        if file.read(len(head)) != head:
            raise ValueError("not as quanterr writes it")
        for block in check_blocks(file):
            try:  # nearly all blocks hold only items of one list
                items[key] += readers[key](b"[%b]" % block.rstrip(b",\n"))
                continue
            except (KeyError, DecodeError):
                pass
            for line in block.splitlines(keepends=True):
                if line.startswith(b"  ") and key in readers:
                    items[key] += readers[key](b"[%b]" % line.rstrip(b",\n"))
                    continue
                rest.append(line)
                if not line.startswith(b"  "):
                    key = line[1:].partition(b'"')[0].decode()
    raw = b"".join(rest)
    return replace(msgspec.json.decode(raw, type=model), **items), raw


def _decode(raw: bytes, model: type[Any], where: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=model)
    except DecodeError as error:
        raise ReportError(f"{where}: {_describe_error(str(error))}") from error
    except RecursionError as error:
        raise ReportError(f"{where}: is nested too deep") from error


def _describe_error(error: str) -> str:
    """Describe an error of the decoder in plain words: its place, the fault and the value in the file."""
    what, _, path = error.partition(" - at `$")
    place = display(path.strip("`").removeprefix("."))
    if missing := re.fullmatch("Object missing required field `(.+)`", what):
        return f"{place}{'.' if place else ''}{missing[1]} is missing; {MAKE_AGAIN}"
    words = re.sub("`([^`]+)`", lambda kinds: " or ".join(WORDS.get(k, k) for k in kinds[1].split(" | ")), what)
    words = display(
        words.replace("Expected", "expected").replace("Number", "number").replace("got", "found"), MAX_MESSAGE_LENGTH
    )
    return f"{place}: {words}" if place else words


def _check(report: Report, records: Any, where: str) -> None:
    """Check that repeated facts of a report agree: a report that lost layers or findings must not be judged."""
    layers, total = len(report.layers), report.aggregate.total_layers
    if layers != total:
        raise ReportError(f"{where}: has {layers:,} layers, but aggregate.total_layers is {total:,}: it was edited")
    for key in LISTS:
        there, n = len(getattr(report, key)), getattr(records, key)
        if there < n:
            raise ReportError(f"{where}: has {there:,} of {n:,} in {key}: it was edited; compare again")
    names = [row.layer_name for key in TENSOR_LISTS for row in getattr(report, key)]
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ReportError(f"{where}: {display(twice)} occurs twice among its layers: it was edited")
    covered = report.coverage.original_compared_fraction or report.coverage.quantized_compared_fraction
    if not names and covered and report.complete:  # an interrupted run may have accounted for labels alone
        raise ReportError(f"{where}: lists no layers, but its coverage counts compared weights: it was edited")


def _check_verdict(report: Report, where: str) -> None:
    """Check that the verdict follows from the rest of the report."""
    against = []
    if report.verdict != "inconclusive":
        against += [] if report.complete else ["the run was interrupted"]
        against += [f"{display(item.layer_name)} was not compared" for item in report.not_compared]
        against += [item.message for item in report.findings if item.severity == "error"]
    if report.verdict == "pass":
        against += [gate.message for gate in report.gates if (gate.status, gate.severity) == ("fail", "error")]
    if against:
        description = display(against[0], MAX_MESSAGE_LENGTH)
        raise ReportError(
            f"{where}: its verdict is {report.verdict}, which its content contradicts: {description}; it was edited, "
            "compare again"
        )
