"""Strict reader of stored reports, without torch.

:func:`read_report` returns the whole model. :func:`read_extract` returns only what rules and comparisons of reports
need: for 50,000 layers it takes an eighth of a second instead of one.

A report whose checksum matches has no duplicate keys and no NaN, because its writer cannot produce them. Any other
report (edited, merged, processed by jq) is searched for them first, which takes longer.
"""

import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError
from pydantic_core import core_schema as core

from quanterr.errors import ReportError
from quanterr.metrics import AGGREGATES, METRICS, Metric
from quanterr.report import COLUMNS, FINGERPRINT, LISTS, NORM, SCHEMA
from quanterr.report.checksum import check_lines, is_unedited, warn
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

Reader = Callable[[bytes], Any]  # of an item of a list, or of a column
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
TENSORS = ("layers", "other_changes", "lossless")  # lists of tensors whose names differ
RECORDS = {"records": dict.fromkeys(LISTS, _COUNT)}


def read_report(path: str | os.PathLike[str]) -> "Report":
    """Read a whole report.

    Raises:
        ReportError: the file is missing, no report, or truncated; its schema version is unknown; it has a wrong type,
            NaN, infinity or a duplicate key; or it contradicts itself.
    """
    from quanterr.report.model import Report

    where = display(os.fspath(path))
    report = _read_report_by_line(path)
    stored: Extract = {"records": {}, "layer_columns": None}  # what one writer repeats agrees with the rest
    if report is None:
        raw = _read_bytes(path, where)
        _check_if_edited(raw, where)
        report = _validate(raw, where, lambda raw: Report.model_validate_json(raw, strict=True))
        stored = _validate(raw, where, SchemaValidator(_make_schema(RECORDS | LAYER_COLUMNS)).validate_json)
    found = _make_picker(_describe_parts((), ()) | {key: [{"layer_name": _TEXT}] for key in TENSORS})(report)
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
    found = _read_extract_by_line(path, parts)
    if found is None:
        raw = _read_bytes(path, where)
        _check_if_edited(raw, where)
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


def _check_if_edited(raw: bytes, where: str) -> None:
    if not (raw.startswith(HEAD) and is_unedited(raw)):
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


def _read_extract_by_line(path: str | os.PathLike[str], parts: JsonObject) -> Extract | None:
    """Return the parts of a report, the layers from their columns if these have all that is asked for.

    None if it is not as written, or a line is invalid: reading the whole then yields the place.
    """
    lists = {
        key: SchemaValidator(_make_schema(part[0])).validate_json
        for key, part in parts.items()
        if isinstance(part, list) and part[0] is not _TEXT
    }
    layer = parts["layers"][0]
    has_columns = layer.keys() <= set(COLUMNS)
    columns = {key: SchemaValidator(_make_schema([layer[key]])).validate_json for key in layer if has_columns}
    try:
        items, by_column, rest = _read_lines(path, lists, columns)
        found: Extract = SchemaValidator(_make_schema(parts)).validate_json(rest)
        if by_column:
            values = zip(*by_column.values(), strict=True)
            items["layers"] = list(map(dict, map(zip, repeat(by_column), values)))
    except (OSError, ValueError):  # includes ValidationError, and columns of unequal length
        return None
    return found | items


def _read_report_by_line(path: str | os.PathLike[str]) -> "Report | None":
    """Return a report, validating each item of a list on its own.

    None if it is not as written, or a line is invalid: reading the whole then yields the place.
    """
    from pydantic import TypeAdapter

    from quanterr.report.model import Report

    hints = get_type_hints(Report, include_extras=True)
    lists = {
        key: partial(TypeAdapter(*get_args(hints[key])).validator.validate_json, strict=True) for key in Report.ITEMS
    }
    try:  # the values of columns are those of the layers
        items, _, rest = _read_lines(path, lists, {})
        report = Report.model_validate_json(rest, strict=True)
    except (OSError, ValueError):  # includes ValidationError
        return None
    return report.model_copy(update=items)


def _read_lines(
    path: str | os.PathLike[str], lists: Mapping[str, Reader], columns: Mapping[str, Reader]
) -> tuple[dict[str, list[Any]], dict[str, Any], bytes]:
    """Read a report that is as written: each item of a list is on its own line, and so is each column of layers.

    Takes two thirds of the time of parsing all at once; memory holds a line.

    Returns:
        the items of ``lists``, the ``columns``, and the other bytes, where lists and columns are empty. If all columns
        were found, there are no layers, otherwise no columns.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not as written, or an item or column is invalid.
    """
    items: dict[str, list[Any]] = {key: [] for key in lists}
    found: dict[str, Any] = {}
    adders = {key: (read, items[key].append) for key, read in lists.items()}
    rest, key = [], ""
    lines = _iterate_lines(path)
    for line in lines:
        if not line.startswith(b"  "):
            rest.append(line)
            key = line[1:].partition(b'"')[0].decode()
            if key == "layers" and found.keys() < columns.keys():  # an earlier version wrote fewer columns
                found = {}
            elif key == "layers" and found:
                deque(islice(lines, len(found["layer_name"])), maxlen=0)  # skipped in C: the columns hold their values
        elif key == "layer_columns":
            name, _, values = line.strip(b' ,\n"').partition(b'": ')
            if read := columns.get(name.decode()):
                found[name.decode()] = read(values)
        elif key in adders and not (found and key == "layers"):
            read, add = adders[key]
            add(read(line.rstrip(b",\n")))
        elif key not in adders:
            rest.append(line)
    return items, found, b"".join(rest)


def _iterate_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    if not os.path.isfile(path):
        raise ValueError("no regular file: it might not be readable twice")
    with open(path, "rb", buffering=0) as file:
        if file.read(len(HEAD)) != HEAD:
            raise ValueError(f"not a {SCHEMA} as quanterr writes it")
        yield from check_lines(file)


def _check_columns(report: "Report", stored: dict[str, list[object]] | None, where: str) -> None:
    """Check that stored columns agree with the layers; earlier versions wrote fewer columns."""
    from quanterr.report.model import collect_columns

    if stored is not None and stored != collect_columns(report.layers, stored):
        raise ReportError(f"{where}: its layer_columns contradict its layers: it was edited; compare again")


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
    names = [row["layer_name"] for key in TENSORS for row in found[key]]
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
