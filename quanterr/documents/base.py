"""Parts that all documents share: the base class, findings and run information, and their strict JSON."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from quanterr.documents.finding_codes import FORMER_NAMES
from quanterr.metrics.scores import doc
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

_encoder = msgspec.json.Encoder()
_pack = msgspec.msgpack.Encoder().encode
SEVERITIES = ("error", "warning", "info")  # of findings, in decreasing order
_INFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")  # NaN and infinity in MessagePack; rarely other bytes


class Model(Struct, gc=False):
    """Base of all parts of documents.

    Readers ignore unknown fields, so that results of newer minor versions can be read. Parts hold no reference cycles
    and are left out of garbage collection, which makes them smaller.
    """


class Waived(Model):
    """A finding as it was before a user waived it, with the last day and the reason of the waiver."""

    severity: Literal["info", "warning", "error"]
    message: str
    until: str
    reason: str


class Finding(Model):
    """Something wrong or suspicious, with what to do about it."""

    code: Annotated[str, doc("see `quanterr explain`")]
    severity: Literal["info", "warning", "error"]
    layer: str | None
    message: str
    remedy: str | None
    evidence: JsonObject
    waived: Annotated[Waived | None, doc("if a user waived it, which makes it an info")] = None

    @property
    def rank(self) -> int:
        """The place of its severity in :data:`SEVERITIES`: 0 for an error."""
        return SEVERITIES.index(self.severity)

    @property
    def statement(self) -> str:
        """The message without the name of the layer, where that is said already."""
        return self.message if self.layer is None else self.message.removeprefix(f"{display(self.layer)}: ")

    def __post_init__(self) -> None:
        """Rename a finding of version 0.1.0."""
        if self.code in FORMER_NAMES:
            self.code = FORMER_NAMES[self.code]


class Tool(Model):
    """The program that wrote the document."""

    name: str
    version: str


class RunInfo(Model, kw_only=True):
    """The part of a document that changes from run to run; all else is the same for the same inputs."""

    started: str
    seconds: float
    device: str
    threads: int
    kernel: Annotated[
        str | None, doc("kernel that computed the sums: native (its instruction set), triton or torch")
    ] = None
    torch: str
    python: str
    read_bytes: int
    command: list[str]


def dumps(value: object) -> str:
    """Return a part of a document as strict ASCII JSON on one line, safe to print on a CI runner.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    text = _dump_lines([value])
    return strict_json.dumps(msgspec.to_builtins(value)) if text is None else text


def dumps_each(values: Sequence[object], separator: str) -> str:
    """Return parts of a document as :func:`dumps` does, joined by ``separator``; faster than dumping each by itself."""
    text = _dump_lines(values)
    return separator.join(map(dumps, values)) if text is None else text.replace("\n", separator)


def _dump_lines(values: Sequence[object]) -> str | None:
    """Return a line of JSON for each value; None if the encoder would leave characters unescaped."""
    if _may_be_infinite(values):
        _require_finite(values)
    with suppress(UnicodeEncodeError):  # raised for lone surrogates
        raw = _encoder.encode_lines(values)
        if raw.isascii() and b"\x7f" not in raw and b"##" not in raw:  # ## may begin a command of a CI runner
            return raw[:-1].decode()
    return None


def _may_be_infinite(values: Sequence[object]) -> bool:
    """Return False only if all numbers are certainly finite."""
    try:
        return _INFINITE.search(_pack(values)) is not None
    except (OverflowError, UnicodeEncodeError):  # raised for large integers and lone surrogates
        return True


def _require_finite(values: Iterable[Any]) -> None:
    """Raise ValueError for NaN and infinity, which the encoder would write as null."""
    for value in values:
        value_type = value.__class__
        if value_type is float:
            if not isfinite(value):
                raise ValueError(f"{value} is not JSON")
        elif value_type is str or value_type is int or value is None:
            pass
        elif value_type is list or value_type is tuple:
            _require_finite(value)
        elif value_type is dict:
            _require_finite(value.values())
        elif isinstance(value, Struct):
            _require_finite(astuple(value))
        elif value_type is not bool:
            raise TypeError(f"a {value_type.__name__} cannot be part of a document: its numbers would not be checked")
