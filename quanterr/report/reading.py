"""Strict reader of stored reports, without torch.

:func:`read_report` returns the whole model. :func:`read_extract` returns only what rules and comparisons of reports
need: for 50,000 layers it takes a quarter of a second instead of several.

A report whose checksum matches has no duplicate keys and no NaN, because its writer cannot produce them. Any other
report (edited, merged, processed by jq) is searched for them first, which takes longer.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError
from pydantic_core import core_schema as core

from quanterr.errors import ReportError
from quanterr.metrics import AGGREGATES, METRICS, Metric
from quanterr.report import COLUMNS, FINGERPRINT, LISTS, NORM, SCHEMA
from quanterr.report.checksum import is_unedited, warn
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.model import Layer, Report

MAJOR = "1"  # of the readable schema versions
HEAD = f'{{\n"schema": "{SCHEMA}",\n"schema_version": "{MAJOR}.'.encode()  # the beginning that the writer produces
GZIP = b"\x1f\x8b"
LONG = 1000  # characters
T = TypeVar("T")

Extract = JsonObject  # uses the report's own keys, selected by `_parts`

_TEXT = core.str_schema(strict=True)
_LATER_TEXT = core.with_default_schema(core.nullable_schema(_TEXT), default=None)  # missing in older reports
_TRUTH = core.bool_schema(strict=True)
_COUNT = core.int_schema(strict=True, ge=0)
_NUMBER = core.float_schema(strict=True, allow_inf_nan=False)
_OPTIONAL_NUMBER = core.nullable_schema(_NUMBER)
_LATER_NUMBER = core.with_default_schema(_OPTIONAL_NUMBER, default=None)
_LATER_VERSION = core.with_default_schema(_COUNT, default=1)

LAYER_COLUMNS = {
    "layer_columns": core.with_default_schema(
        core.nullable_schema(core.dict_schema(_TEXT, core.list_schema(core.any_schema()))), default=None
    )
}
LAYERS, BEHIND_LAYERS, LAYER_COLUMNS_KEY = b'\n"layers": [', b'\n"other_changes": ', b'\n"layer_columns": '
RECORDS = {"records": dict.fromkeys(LISTS, _COUNT)}


def read_report(path: str | os.PathLike[str]) -> "Report":
    """Read a whole report.

    Raises:
        ReportError: the file is missing, no report, or truncated; its schema version is unknown; it has a wrong type,
            NaN, infinity or a duplicate key; or it contradicts itself.
    """
    from quanterr.report.model import Report

    where = display(os.fspath(path))
    raw = _read_bytes(path, where)
    as_written = _is_unedited(raw)
    _check_if_edited(raw, as_written, where)
    report = _read_items_by_line(raw, Report) if as_written else None
    if report is None:
        report = _validate(raw, where, lambda raw: Report.model_validate_json(raw, strict=True))
    found = extract(report)
    if as_written:  # repeated values agree if one writer wrote all of them
        _check(found, {}, where)
    else:
        stored = _validate(raw, where, SchemaValidator(_make_schema(RECORDS | LAYER_COLUMNS)).validate_json)
        _check(found, stored["records"], where)
        _check_columns(report, stored["layer_columns"], where)
    _check_verdict(found, where)
    return report


def read_extract(
    path: str | os.PathLike[str],
    metrics: Collection[str] = (),
    aggregates: Collection[str] = (),
    *,
    verdict: bool = False,
) -> Extract:
    """Read the part of a report that :func:`extract` selects; the rest must only be valid JSON.

    ``verdict`` also checks the stored verdict; gates form their own.

    Raises:
        ReportError: as for :func:`read_report`; contradictions of the verdict only with ``verdict``.
    """
    where = display(os.fspath(path))
    parts = _describe_parts(metrics, aggregates) | RECORDS
    raw = _read_bytes(path, where)
    checked: list[bool] = []
    checksum = Thread(target=lambda: checked.append(_is_unedited(raw)))  # computed meanwhile
    checksum.start()
    found = _read_by_line(raw, parts) if raw.startswith(HEAD) else None
    checksum.join()
    _check_if_edited(raw, checked == [True], where)
    if found is None or checked != [True]:
        found = _validate(raw, where, SchemaValidator(_make_schema(parts)).validate_json)
    _check(found, found.pop("records"), where)
    if verdict:
        _check_verdict(found, where)
    return found


def extract(report: "Report", metrics: Collection[str] = (), aggregates: Collection[str] = ()) -> Extract:
    """Return the parts of a report that rules and comparisons need, with these metrics of layers and of the whole."""
    picked: Extract = _make_picker(_describe_parts(metrics, aggregates))(report)
    return picked


def make_extractor(metrics: Collection[str]) -> "Callable[[Layer], JsonObject]":
    """Return a function that extracts the same parts of a single layer."""
    return _make_picker(_describe_parts(metrics, ())["layers"][0])


def _describe_parts(metrics: Collection[str], aggregates: Collection[str]) -> JsonObject:
    """Return the parts to read: keys of an object, the description of a list's items, or the schema of a value."""
    tensor = {"layer_name": _TEXT, "format": _TEXT, "tensor_elements": _COUNT}
    if NORM in metrics:  # callers need the norm to recognize the original
        tensor[FINGERPRINT] = _LATER_TEXT
    layer = (
        tensor | {"finite": _TRUTH, "nonfinite": core.dict_schema(_TEXT, _TEXT)} | _describe_metrics(METRICS, metrics)
    )
    return {
        "schema": _TEXT,
        "schema_version": _TEXT,
        "verdict": core.literal_schema(["pass", "fail", "inconclusive"]),
        "reasons": [_TEXT],
        "complete": _TRUTH,
        "original": {"tensors": _COUNT, "bytes": _COUNT},
        "quantized": {"bytes": _COUNT},
        "selection": {"patterns": [_TEXT]},
        "settings": {"outlier_threshold": _NUMBER, "importance": _LATER_TEXT, "metrics_version": _LATER_VERSION},
        "coverage": {
            "original_compared_fraction": _OPTIONAL_NUMBER,
            "quantized_compared_fraction": _OPTIONAL_NUMBER,
        },
        "findings": [
            {
                "code": _TEXT,
                "severity": core.literal_schema(["info", "warning", "error"]),
                "layer": core.nullable_schema(_TEXT),
                "message": _TEXT,
            }
        ],
        "gates": [{"message": _TEXT, "severity": _TEXT, "status": _TEXT}],
        "aggregate": {"total_layers": _COUNT, "nonfinite": core.dict_schema(_TEXT, _TEXT)}
        | _describe_metrics(AGGREGATES, aggregates),
        "layers": [layer],
        "other_changes": [layer],
        "lossless": [tensor | {"bits_per_weight": _OPTIONAL_NUMBER, "original_norm": _LATER_NUMBER}],
        "not_compared": [{"layer_name": _TEXT, "bucket": _TEXT, "reason": _TEXT}],
    }


def _describe_metrics(rows: tuple[Metric, ...], names: Collection[str]) -> JsonObject:
    """Return the parts for metrics by name, such as "snr_db" or "absolute_error_percentiles.p99"."""
    kinds = {row.name: row for row in rows}
    parts: JsonObject = {}
    for name in names:
        key, _, percentile = name.partition(".")
        if percentile:
            parts.setdefault(key, {})[percentile] = _OPTIONAL_NUMBER
        else:
            number = _LATER_NUMBER if kinds[key].later else _OPTIONAL_NUMBER
            parts[key] = _COUNT if kinds[key].kind == "count" else number
    return parts


def _make_schema(parts: Any) -> CoreSchema:
    if isinstance(parts, list):
        return core.list_schema(_make_schema(parts[0]), strict=True)
    if "type" in parts:
        schema: CoreSchema = parts
        return schema
    return core.typed_dict_schema(
        {key: core.typed_dict_field(_make_schema(part)) for key, part in parts.items()}, extra_behavior="ignore"
    )


def _make_picker(parts: Any) -> Callable[[Any], Any]:
    """Return a function that picks the parts from an object, or from each item of a list."""
    if isinstance(parts, list):
        of_item = _make_picker(parts[0])
        return lambda items: [of_item(item) for item in items]
    if "type" in parts:
        return lambda value: value
    get = attrgetter(*("schema_" if key == "schema" else key for key in parts))
    inner = {key: _make_picker(part) for key, part in parts.items() if isinstance(part, list) or "type" not in part}
    if len(parts) == 1:  # then attrgetter returns the value alone
        return lambda value: {key: inner[key](get(value)) if key in inner else get(value) for key in parts}

    def pick(value: Any) -> Any:
        picked = dict(zip(parts, get(value), strict=True))
        for key, of_part in inner.items():
            picked[key] = of_part(picked[key])
        return picked

    return pick


def _check_if_edited(raw: bytes, as_written: bool, where: str) -> None:
    if not as_written:
        _check_content(raw, where)
        warn(where)


def _read_bytes(path: str | os.PathLike[str], where: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ReportError(f"{where}: no such file") from error
    except IsADirectoryError as error:
        raise ReportError(f"{where}: this is a folder; give the report.json in it") from error
    except (OSError, ValueError) as error:
        raise ReportError(f"{where}: {getattr(error, 'strerror', None) or error}") from error


def _validate(raw: bytes, where: str, validate_json: Callable[[bytes], T]) -> T:
    try:
        return validate_json(raw)
    except ValidationError as error:
        raise ReportError(f"{where}: {describe_error(error)}") from error


def _read_by_line(raw: bytes, parts: JsonObject) -> Extract | None:
    """Return the parts of a report that is as written, where each item of a list is on its own line.

    Takes two thirds of the time of parsing all at once, and a third of the memory. None if a line is invalid (parsing
    the whole then yields the place) or a later version wrote other lines.
    """
    lists = {
        key: _make_schema(part[0]) for key, part in parts.items() if isinstance(part, list) and part[0] is not _TEXT
    }
    readers = {key: SchemaValidator(schema).validate_json for key, schema in lists.items()}
    try:
        of_columns, elsewhere = _read_columns(raw, parts["layers"][0])
        items, rest = _take_items(elsewhere, readers, lambda key: True)
        found: Extract = SchemaValidator(_make_schema(parts)).validate_json(rest)
    except ValueError:  # includes ValidationError, and columns of unequal length
        return None
    return found | items | of_columns


def _read_items_by_line(raw: bytes, kind: "type[Report]") -> "Report | None":
    """Return a report that is as written, validating each item of a list on its own: half the memory, and faster.

    None if a line is invalid: parsing the whole then yields the place.
    """
    from pydantic import TypeAdapter

    hints = get_type_hints(kind, include_extras=True)
    readers = {
        key: partial(TypeAdapter(*get_args(hints[key])).validator.validate_json, strict=True) for key in kind.ITEMS
    }
    try:  # the values of columns are those of the layers
        items, rest = _take_items(raw, readers, lambda key: key == "layer_columns")
        report = kind.model_validate_json(rest, strict=True)
    except ValueError:  # includes ValidationError
        return None
    return report.model_copy(update=items)


def _take_items(
    raw: bytes, readers: Mapping[str, Callable[[bytes], object]], skips: Callable[[str], bool]
) -> tuple[dict[str, list[object]], bytes]:
    """Return the items of the lists that ``readers`` read, each from its line, and the other bytes.

    These include each list's key with no items: an empty list. Items of other lists that ``skips`` names are left out.
    """
    items: dict[str, list[object]] = {key: [] for key in readers}
    adders = {key: (validate, items[key].append) for key, validate in readers.items()}
    rest, key = [], ""
    for line in BytesIO(raw):
        if not line.startswith(b"  "):
            rest.append(line)
            key = line[1:].partition(b'"')[0].decode()
        elif key in adders:
            validate, add = adders[key]
            add(validate(line.rstrip(b",\n")))
        elif not skips(key):
            rest.append(line)
    return items, b"".join(rest)


def _read_columns(raw: bytes, layer: JsonObject) -> tuple[JsonObject, bytes]:
    """Return the layers as read from a report's columns, and its other bytes.

    There are no layers, and all bytes are others, if columns are missing or lack a requested value.
    """
    begin = raw.find(LAYERS)
    first, last = raw.rfind(LAYER_COLUMNS_KEY, 0, max(begin, 0)), raw.rfind(BEHIND_LAYERS)
    if first < 0 or last < begin or not layer.keys() <= set(COLUMNS):
        return {}, raw
    columns = {}
    for line in BytesIO(raw[first + len(LAYER_COLUMNS_KEY) : begin]):  # one column per line
        name, _, values = line.partition(b": ")
        key = name.decode().strip().strip('"')
        if key in layer:
            schema = core.list_schema(layer[key], strict=True)
            columns[key] = SchemaValidator(schema).validate_json(values.rstrip(b",\n"))
    if columns.keys() < layer.keys():  # an earlier version wrote fewer columns
        return {}, raw
    layers = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {"layers": layers}, raw[:first] + LAYERS + b"]" + raw[last - 1 :]


def _check_columns(report: "Report", stored: dict[str, list[object]] | None, where: str) -> None:
    """Check that stored columns agree with the layers; earlier versions wrote fewer columns."""
    from quanterr.report.model import collect_columns

    if stored is not None and stored != collect_columns(report.layers, stored):
        raise ReportError(f"{where}: its layer_columns contradict its layers: it was edited; compare again")


def _is_unedited(raw: bytes) -> bool:
    """Return True for a report of a known version whose bytes are as written."""
    return raw.startswith(HEAD) and is_unedited(raw)


def _check_content(raw: bytes, where: str) -> None:
    """Reject invalid content and unknown versions of an edited report."""
    if not raw.strip():
        raise ReportError(f"{where}: empty file")
    if raw.startswith(GZIP):
        raise ReportError(f"{where}: this is a compressed file; unpack it first, such as by gunzip")
    try:
        value = strict_json.loads(raw)
    except strict_json.InvalidJson as error:
        raise ReportError(f"{where}: {display(str(error))}; it is not a report, or was truncated or edited") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ReportError(f'{where}: not a report of quanterr (its "schema" is not "{SCHEMA}")')
    version = value.get("schema_version")
    if not isinstance(version, str) or not re.fullmatch(rf"{MAJOR}\.\d+", version):
        found = display(str(version), 40)
        raise ReportError(
            f"{where}: report schema {found}, this version reads {MAJOR}.x; compare again with this version"
        )


def describe_error(error: ValidationError, again: str = "compare again") -> str:
    """Return the first of the errors: where, what is wrong, what was found; ``again`` makes what is missing."""
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "missing":
        return f"{display(path)} is missing; {again} with this version"
    found = "" if first["type"] == "json_invalid" else f", found {display(repr(first['input']), 60)}"
    return f"{display(path)}: {first['msg']}{found}" if path else f"{first['msg']}{found}"


def _check(found: Extract, records: dict[str, int], where: str) -> None:
    """Check that repeated facts of a report agree: a report that lost layers or findings must not be judged."""
    layers, total = len(found["layers"]), found["aggregate"]["total_layers"]
    if layers != total:
        raise ReportError(f"{where}: has {layers:,} layers, but aggregate.total_layers is {total:,}: it was edited")
    for key, n in records.items():
        if len(found[key]) < n:
            raise ReportError(f"{where}: has {len(found[key]):,} of {n:,} in {key}: it was edited; compare again")
    names = [row["layer_name"] for key in ("layers", "other_changes", "lossless") for row in found[key]]
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ReportError(f"{where}: {display(twice)} occurs twice among its layers: it was edited")
    covered = any(found["coverage"][f"{side}_compared_fraction"] for side in ("original", "quantized"))
    if not names and covered and found["complete"]:  # an interrupted run may have accounted for labels alone
        raise ReportError(f"{where}: lists no layers, but its coverage counts compared weights: it was edited")


def _check_verdict(found: Extract, where: str) -> None:
    """Check that the verdict follows from the rest of the report."""
    verdict, against = found["verdict"], []
    if verdict != "inconclusive":
        against += [] if found["complete"] else ["the run was interrupted"]
        against += [f"{display(item['layer_name'])} was not compared" for item in found["not_compared"]]
        against += [item["message"] for item in found["findings"] if item["severity"] == "error"]
    if verdict == "pass":
        failed = [gate for gate in found["gates"] if (gate["status"], gate["severity"]) == ("fail", "error")]
        against += [gate["message"] for gate in failed]
    if against:
        description = display(against[0], LONG)
        raise ReportError(
            f"{where}: its verdict is {verdict}, which its content contradicts: {description}; it was edited, "
            "compare again"
        )
