"""Check that two reports have the same original and are comparable."""

from collections.abc import Iterable, Iterator, Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

from quanterr.util.text import display, format_decisive

if TYPE_CHECKING:
    from quanterr.documents.comparison.model import Report

OTHER_ORIGINAL = "it has a different original"
NORM_TOLERANCE = 1e-6  # for norms from two devices: sums of chunks in float32 are accurate to 1e-8


def find_difference(old: "Report", new: "Report") -> str | None:
    """Return why two reports cannot be compared, or None. Both need the metric :data:`NORM`.

    Original, selection, outlier threshold and metrics version must agree.
    """
    if why := find_other_original(old, new):
        return f"{OTHER_ORIGINAL}: {why}"
    return find_other_settings(old, new)


def find_other_original(old: "Report", new: "Report") -> str | None:
    """Return how the originals of two reports differ, or None.

    An original is identified by its number of tensors, its bytes, and the norm and fingerprint of each tensor that both
    reports compare and find finite.
    """
    for key in ("tensors", "bytes"):
        before, after = (getattr(report.original, key) for report in (old, new))
        if before != after:
            return f"{before:,} {key} there, {after:,} here"
    return find_other_tensor(_iterate_finite(old), _iterate_finite(new))


def find_other_layers(old: "Report", new: "Report") -> str | None:
    """Return how the layers of two reports differ in name or size, whatever their values; None if they do not."""
    there, here = ({row.layer_name: row.tensor_elements for row in _iterate_rows(report)} for report in (old, new))
    for name in sorted(there.keys() | here.keys()):
        before, after = there.get(name), here.get(name)
        if before is None or after is None:
            return f"{display(name)} is only {'here' if before is None else 'there'}"
        if before != after:
            return f"{display(name)} has {before:,} elements there, {after:,} here"
    return None


def find_other_settings(old: "Report", new: "Report", any_selection: bool = False) -> str | None:
    """Return how the selections or settings of two reports differ, or None; with ``any_selection``, only settings."""
    if old.selection != new.selection and not any_selection:
        return describe_selections(old.selection.patterns, new.selection.patterns)
    for key, what in (("outlier_threshold", "outlier threshold"), ("metrics_version", "version of the metrics")):
        before, after = (getattr(report.settings, key) for report in (old, new))
        if before != after:
            return f"it has another {what}: {before} there, {after} here"
    return None


def describe_selections(there: Sequence[str], here: Sequence[str]) -> str:
    """Return the message that the patterns of two results differ."""
    shown = [display(" ".join(patterns) or "all layers") for patterns in (there, here)]
    return f"it has a different selection: {shown[0]} there, {shown[1]} here"


def find_other_source(old: Any, new: Any) -> str | None:
    """Return how the originals or selections of two rankings or plans differ, or None."""
    if old.original_bytes != new.original_bytes:
        return f"it has a different original: {old.original_bytes:,} bytes there, {new.original_bytes:,} here"
    if old.selection.patterns != new.selection.patterns:
        return describe_selections(old.selection.patterns, new.selection.patterns)
    return None


def find_other_tensor(there: Iterable[Any], here: Iterable[Any]) -> str | None:
    """Find the first tensor that certainly differs between two originals, and return how; None if there is none.

    ``there`` and ``here`` list layers with the norm and the fingerprint of the original, each None where unknown.
    """
    known = {layer.layer_name: layer for layer in there}
    for layer in here:
        if (other := known.get(layer.layer_name)) is None:
            continue
        before, after, name = other.original_norm, layer.original_norm, layer.layer_name
        if None not in (before, after) and not isclose(before, after, rel_tol=NORM_TOLERANCE):
            norms = f"{format_decisive(before, after)} there, {format_decisive(after, before)} here"
            return f"the norm of the original {display(name)} is {norms}"
        before, after = other.original_fingerprint, layer.original_fingerprint
        if before and after and before != after:
            return f"the original {display(name)} has other values there than here, but the same norm"
    return None


def _iterate_finite(report: "Report") -> Iterator[Any]:
    """Yield the compared tensors that are finite on both sides."""
    return (row for row in _iterate_rows(report) if getattr(row, "finite", True))


def _iterate_rows(report: "Report") -> Iterator[Any]:
    for rows in (report.layers, report.other_changes, report.lossless):
        yield from rows
