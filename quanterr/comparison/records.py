"""Lossless conversion of a compared weight to JSON and back, for journals and for sending between ranks.

Integers are hexadecimal text, as sums have thousands of bits; floats are ``float.hex``, which is exact. Nothing in a
record is executed, and invalid records raise ValueError.
"""

import json
from base64 import b64decode, b64encode
from dataclasses import fields
from typing import Any, get_args

from msgspec.structs import asdict, replace

from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.lazy_torch import torch
from quanterr.metrics.attainable import Attainable, BadRegion, Kind
from quanterr.metrics.histogram import Histogram
from quanterr.metrics.peaks import Peaks
from quanterr.metrics.sums import ADDED, RowSums, Sums, WorstPlace
from quanterr.pairing.model import LargestError, WeightResult
from quanterr.tensors.casts import Copy
from quanterr.util.strict_json import JsonObject

FLOAT_FIELDS = ("e_max", "e_min", "relative_max", "x_max", "cast_max")
MAX_BINS = 1 << 16  # maximum number of bins of a histogram in a record


def pack(done: WeightResult) -> str:
    """Return the weight as one line of JSON."""
    sums = done.sums
    record: JsonObject = {
        "sums": {name: f"{value:x}" for name in ADDED if (value := getattr(sums, name))},
        "floats": [getattr(sums, name).hex() for name in FLOAT_FIELDS],
        "rows": [[number, *_pack_row(row)] for number, row in sums.rows.items()],
        "matrices": [[number, *_pack_row(row)] for number, row in sums.matrices.items()],
    }
    if sums.worst is not None:
        record["worst_row"] = [_pack_value(value) for value in (*sums.worst[:3], *(sums.worst.values or ()))]
    if sums.histogram is not None:
        counts = sums.histogram.counts
        used = counts.nonzero().view(-1)
        record["histogram"] = [sums.histogram.zeros, sums.histogram.first, used.tolist(), counts[used].tolist()]
    if sums.peaks:
        record["peaks"] = [
            [piece.first, list(piece.values.shape), b64encode(piece.values.contiguous().numpy().tobytes()).decode()]
            for piece in sums.peaks
        ]
    if done.scales is not None:
        record["scales"] = [_pack_value(value) for value in done.scales]
    if done.worst is not None:
        record["worst"] = [done.worst.row, done.worst.col, done.worst.x.hex(), done.worst.y.hex()]
    if done.attainable is not None:
        attainable = asdict(done.attainable)
        attainable["parts"] = [[_pack_value(value) for value in part] for part in done.attainable.parts]
        record["attainable"] = [_pack_value(value) for value in attainable.values()]
    if done.copy is not None:
        record["copy"] = done.copy
    if done.fingerprint is not None:
        record["fingerprint"] = done.fingerprint
    return json.dumps(record, separators=(",", ":"))


def unpack(number: int, text: str) -> WeightResult:
    """Parse the record of weight ``number``.

    Raises:
        ValueError: the text is not a valid record.
    """
    try:
        record = json.loads(text)
        sums = Sums()
        for name in ADDED:
            setattr(sums, name, int(record["sums"].get(name, "0"), 16))
        for name, value in zip(FLOAT_FIELDS, record["floats"], strict=True):
            setattr(sums, name, float.fromhex(value))
        sums.rows = {int(row[0]): _unpack_row(row[1:]) for row in record["rows"]}
        sums.matrices = {int(row[0]): _unpack_row(row[1:]) for row in record["matrices"]}
        if "worst_row" in record:
            error, row, col, *values = record["worst_row"]
            x_and_y = (float.fromhex(values[0]), float.fromhex(values[1])) if values else None
            sums.worst = WorstPlace(float.fromhex(error), int(row), int(col), x_and_y)
        if "histogram" in record:
            sums.histogram = _unpack_histogram(*record["histogram"])
        for first, shape, encoded in record.get("peaks", ()):
            peaks = torch.frombuffer(bytearray(b64decode(encoded, validate=True)), dtype=torch.float32)
            sums.peaks.append(Peaks(int(first), peaks.reshape(shape)))
        scales = ScaleStatistics(*map(_unpack_value, record["scales"])) if "scales" in record else None
        worst = None
        if "worst" in record:
            row, col, x, y = record["worst"]
            worst = LargestError(int(row), int(col), float.fromhex(x), float.fromhex(y))
        attainable = None
        if "attainable" in record:
            attainable = Attainable(*map(_unpack_value, record["attainable"]))
            attainable = replace(attainable, parts=tuple(BadRegion(*part) for part in attainable.parts))
        copy = Copy(record["copy"]) if "copy" in record else None
        fingerprint = None if "fingerprint" not in record else str(record["fingerprint"])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"not a record of a weight: {error!r}") from error
    return WeightResult(number, sums, scales, worst, attainable, copy, fingerprint)


def _pack_row(row: RowSums) -> list[object]:
    return [f"{row.x_sq:x}", f"{row.e_sq:x}", row.e_max.hex(), row.whole, row.zeroed]


def _unpack_row(row: list[Any]) -> RowSums:
    x_sq, e_sq, e_max, whole, zeroed = row
    return RowSums(int(x_sq, 16), int(e_sq, 16), float.fromhex(e_max), bool(whole), bool(zeroed))


def _pack_value(value: object) -> Any:
    """Convert a float to text; other values are JSON already."""
    return value.hex() if isinstance(value, float) else value


def _unpack_value(value: object) -> Any:
    """Convert lists to tuples, and text back to floats unless it names a kind of region."""
    if not isinstance(value, str):
        return tuple(map(_unpack_value, value)) if isinstance(value, list) else value
    return value if value in get_args(Kind) else float.fromhex(value)


def _unpack_histogram(zeros: int, first: int, used: list[int], counts: list[int]) -> Histogram:
    if used and not 0 <= max(used) < MAX_BINS:
        raise ValueError("a histogram with too many bins")
    bins = torch.zeros(max(used) + 1 if used else 0, dtype=torch.int64)
    if used:
        bins[torch.tensor(used)] = torch.tensor(counts)
    return Histogram(int(zeros), bins, int(first))


PACKED_FIELDS = {*ADDED, *FLOAT_FIELDS, "worst", "rows", "matrices", "histogram", "peaks"}
assert {field.name for field in fields(Sums) if field.init} == PACKED_FIELDS  # noqa: S101
