"""The diff of two reports of one original: plain data with a schema version."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import msgspec.structs

from quanterr.documents.diff.base import Difference
from quanterr.util.strict_json import JsonObject

SCHEMA = "quanterr.diff"
SCHEMA_VERSION = "1.1"


class Both(msgspec.Struct, frozen=True, gc=False):
    """A layer present in both reports; its SNR is infinite if identical to the original, None if undefined."""

    name: str
    old_snr_db: float | None
    new_snr_db: float | None
    change_db: float | None
    format: str | None  # format in the new report


@dataclass(slots=True)
class Totals:
    """One of the two reports as a whole."""

    path: str
    verdict: str
    layers: int
    overall_snr_db: float | None
    excess_db: float | None
    bits_per_weight: float | None
    quantized_bytes: int


@dataclass(slots=True)
class Change:
    """A changed layer present in both. An SNR is null if it is undefined or infinite; ``reason`` explains which."""

    layer: str
    old_snr_db: float | None
    new_snr_db: float | None
    change_db: float | None
    reason: str | None
    old_excess_db: float | None = None  # null if the format has no nearest codes, and in reports up to schema 1.1
    new_excess_db: float | None = None


@dataclass(slots=True)
class FormatChange:
    """A layer stored in a different format than before."""

    layer: str
    old_format: str
    new_format: str


@dataclass(slots=True, repr=False)
class Diff(Difference):
    """The diff of two reports. If the comparison was forced, ``difference`` explains why they are not comparable.

    ``worse`` and ``better`` begin with layers that have an SNR in only one report, then the largest change; ``better``
    ends with layers that became identical to the original. ``undefined`` are layers without an SNR in either.
    """

    schema: str
    schema_version: str
    old: Totals
    new: Totals
    difference: str | None
    added: list[str]
    gone: list[str]
    format_changes: list[FormatChange]
    unchanged: int = 0
    worse: list[Change] = field(default_factory=list)
    better: list[Change] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)
    layers: list[Both] = field(default_factory=list, repr=False)  # layers of both reports; in JSON only changed ones

    def _iterate_frame_rows(self) -> Iterator[JsonObject]:
        return map(msgspec.structs.asdict, self.layers)

    def to_dict(self) -> JsonObject:
        """Plain data for JSON."""
        fields = asdict(replace(self, layers=[]))
        del fields["layers"]
        return fields
