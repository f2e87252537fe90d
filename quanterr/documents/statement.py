"""The statement of origin: an in-toto Statement v1 about the files of a quantized checkpoint.

Its subjects are these files, its materials those of the original, each by its SHA-256. The predicate says how each
tensor's values relate to the original's, by all of its codes. Programs for signatures and attestations take it as it
is. ``checksum`` is the SHA-256 of the statement with an empty checksum, as JSON with sorted keys and without white
space.

Reference: in-toto/attestation spec/v1/statement.md, spec/v1/resource_descriptor.md.
"""

import json
import os
from hashlib import sha256
from inspect import cleandoc
from typing import IO, Annotated, Literal

import msgspec
from msgspec import Struct

from quanterr.documents.base import Model, Tool
from quanterr.documents.comparison.model import ComparedFile, Coverage, Report, Settings, Side
from quanterr.documents.comparison.origin import NOT_SHOWN, ClassSize, OriginClass, TensorOrigin, sum_classes
from quanterr.documents.document import DRAFT
from quanterr.documents.reading import read_json
from quanterr.errors import ReportError, UsageError
from quanterr.metrics.scores import doc
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import count, display, itemize

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://github.com/quanterr/quanterr/origin/v1"  # the last part is the version of the predicate
SCHEMA, VERSION = "quanterr.origin", "1.0"
Verdict = Literal["shown", "not shown"]
SHOWN: Verdict = "shown"
SOME_NOT_SHOWN: Verdict = "not shown"


class Resource(Struct, omit_defaults=True):
    """A file, as in-toto's ResourceDescriptor."""

    name: str
    digest: Annotated[dict[str, str], doc("sha256 of the whole file")]
    uri: Annotated[str | None, doc("where it comes from, with the commit, if it is known")] = None


class Predicate(Model, kw_only=True, rename={"schema_": "schema"}):
    """What is shown of the subjects."""

    schema_: str = SCHEMA
    schema_version: str = VERSION
    tool: Tool
    kernel: Annotated[str | None, doc("native, with its instruction set, or torch")]
    verdict: Annotated[Verdict, doc("`shown` if every tensor of the subjects is in a class but `not_shown`")]
    reasons: list[str]
    materials: Annotated[list[Resource], doc("files of the original")]
    options: Annotated[Settings, doc("what the comparison was given")]
    patterns: Annotated[list[str], doc("the selection of layers; empty: all")]
    coverage: Coverage
    classes: dict[OriginClass, ClassSize]
    tensors: list[TensorOrigin]
    checksum: str = ""


class Statement(Model, kw_only=True, rename={"type_": "_type", "predicate_type": "predicateType"}):
    """A statement of origin."""

    type_: str = TYPE
    subject: Annotated[list[Resource], doc("files of the quantized checkpoint")]
    predicate_type: str = PREDICATE_TYPE
    predicate: Predicate

    def to_json(self) -> str:
        """Return strict ASCII JSON, with the checksum."""
        fields: JsonObject = msgspec.to_builtins(self)
        fields["predicate"]["checksum"] = _compute_checksum(fields)
        return strict_json.dumps(fields, indent=1) + "\n"


def make_statement(report: Report) -> Statement:
    """Make the statement from the report of a complete comparison with ``--every-code``.

    Raises:
        UsageError: the report is another one.
    """
    if not report.settings.every_code or not report.complete:
        raise UsageError("a statement of origin needs a complete comparison with --every-code")
    reasons = _list_reasons(report)
    return Statement(
        subject=_list_files(report.quantized),
        predicate=Predicate(
            tool=report.tool,
            kernel=report.run.kernel,
            verdict=SOME_NOT_SHOWN if reasons else SHOWN,
            reasons=reasons or ["every tensor is the original, rounded"],
            materials=_list_files(report.original),
            options=report.settings,
            patterns=report.selection.patterns,
            coverage=report.coverage,
            classes=sum_classes(report.origin),
            tensors=report.origin,
        ),
    )


def _list_reasons(report: Report) -> list[str]:
    lost = [tensor.display_name for tensor in report.origin if tensor.kind == NOT_SHOWN]
    reasons = [f"{count(len(lost), 'tensor')} not shown: {itemize(lost, 3)}"] if lost else []
    if left := report.coverage.quantized.get("filtered_out"):
        reasons.append(f"{count(left.tensors, 'tensor')} not selected")
    return reasons if report.origin else [*reasons, "there is no tensor"]


def _list_files(side: Side) -> list[Resource]:
    return [_describe_file(side, file) for file in (*side.files, *side.configs)]


def _describe_file(side: Side, file: ComparedFile) -> Resource:
    if file.sha256 is None:
        raise UsageError(f"{display(file.name)}: its SHA-256 is unknown; a statement needs files on a disk or a store")
    uri = None if side.revision is None else f"hf://{side.path.removeprefix('hf://')}@{side.revision}/{file.name}"
    return Resource(file.name, {"sha256": file.sha256}, uri)


def _compute_checksum(fields: JsonObject) -> str:
    plain = fields | {"predicate": as_object(fields.get("predicate")) | {"checksum": ""}}
    return sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write(report: Report, file: IO[str]) -> None:
    """Write the statement of a report to a file."""
    file.write(make_statement(report).to_json())


def read_statement(path: str | os.PathLike[str]) -> Statement:
    """Read a statement, and check that nobody edited it after quanterr wrote it.

    Raises:
        ReportError: the file is missing, no statement of origin, of an unknown version, or edited.
    """
    _, fields = read_json(path)
    where, predicate = display(os.fspath(path)), as_object(fields.get("predicate"))
    if fields.get("_type") != TYPE or not isinstance(fields.get("predicateType"), str):
        raise ReportError(f"{where}: no in-toto statement ({TYPE}); give what compare --every-code -o wrote")
    if fields["predicateType"] != PREDICATE_TYPE:
        stated = display(fields["predicateType"], 100)
        raise ReportError(f"{where}: its predicate is {stated}, and this version reads {PREDICATE_TYPE}")
    version = predicate.get("schema_version")
    if predicate.get("schema") != SCHEMA or not str(version).startswith("1."):
        stated = display(f"{predicate.get('schema')} {version}", 100)
        raise ReportError(f"{where}: its predicate is {stated}, and this version reads {SCHEMA} 1.x")
    if predicate.get("checksum") != _compute_checksum(fields):
        raise ReportError(f"{where}: its checksum does not match: the statement was edited; make it again")
    try:
        return msgspec.convert(fields, Statement)
    except msgspec.ValidationError as error:
        raise ReportError(f"{where}: {error}; make it again with this version") from error


def make_schema() -> JsonObject:
    """Return the JSON Schema (2020-12) of statements of origin."""
    schema: JsonObject = msgspec.json.schema(Statement)
    statement: JsonObject = schema["$defs"].pop("Statement")
    statement["properties"]["_type"] = {"const": TYPE}
    statement["properties"]["predicateType"] = {"const": PREDICATE_TYPE}
    predicate = schema["$defs"]["Predicate"]
    predicate["properties"]["schema"] = {"const": SCHEMA}
    predicate["properties"]["schema_version"] = {"type": "string", "pattern": r"^1\.\d+$"}
    predicate["properties"]["checksum"] = {"type": "string", "description": "SHA-256; reveals that it was edited"}
    for part, model in ((statement, Statement), (predicate, Predicate)):
        part["required"] = list(model.__struct_encode_fields__)
    for part in (statement, *schema["$defs"].values()):
        if "description" in part:
            part["description"] = cleandoc(part["description"])
    return {"$schema": DRAFT, "$id": "urn:quanterr:origin:1"} | statement | {"$defs": schema["$defs"]}
