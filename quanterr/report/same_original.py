"""Check that two reports have the same original and are comparable."""

from collections.abc import Mapping, Sequence
from math import isclose
from typing import TYPE_CHECKING, NamedTuple

from quanterr.util.text import display

if TYPE_CHECKING:
    from quanterr.report.model import Report

NORM_TOLERANCE = 1e-6  # for norms from two devices: sums of chunks in float32 are accurate to 1e-8


def find_difference(old: "Report", new: "Report") -> str | None:
    """Return why two reports cannot be compared, or None. Both need the metric :data:`NORM`.

    Original, selection, outlier threshold and metrics version must agree. The original is identified by its number of
    tensors, its bytes, and the norm and fingerprint of each tensor that both reports compare and find finite.
    """
    for key, what in (("tensors", "tensors"), ("bytes", "bytes")):
        before, after = (getattr(report.original, key) for report in (old, new))
        if before != after:
            return f"it has a different original: {before:,} {what} there, {after:,} here"
    if old.selection != new.selection:
        return describe_selections(old.selection.patterns, new.selection.patterns)
    for key, what in (("outlier_threshold", "outlier threshold"), ("metrics_version", "version of the metrics")):
        before, after = (getattr(report.settings, key) for report in (old, new))
        if before != after:
            return f"it has another {what}: {before} there, {after} here"
    why = find_other_tensor(_collect_marks(old), _collect_marks(new))
    return f"it has a different original: {why}" if why else None


def describe_selections(there: Sequence[str], here: Sequence[str]) -> str:
    """Say that the patterns of two results differ."""
    shown = [display(" ".join(patterns) or "all layers") for patterns in (there, here)]
    return f"it has a different selection: {shown[0]} there, {shown[1]} here"


class Marks(NamedTuple):
    """Properties that identify a tensor of an original; None if unknown."""

    norm: float | None
    fingerprint: str | None


def find_other_tensor(there: Mapping[str, Marks], here: Mapping[str, Marks]) -> str | None:
    """Return why the first tensor that differs between two originals does; None if nothing shows that one does."""
    differences = (_find_tensor_difference(name, there[name], own) for name, own in here.items() if name in there)
    return next((why for why in differences if why), None)


def _find_tensor_difference(name: str, there: Marks, here: Marks) -> str | None:
    if there.norm is not None and here.norm is not None and not isclose(there.norm, here.norm, rel_tol=NORM_TOLERANCE):
        return f"the norm of the original {display(name)} is {there.norm} there, {here.norm} here"
    if there.fingerprint and here.fingerprint and there.fingerprint != here.fingerprint:
        return f"the original {display(name)} has other values there than here, but the same norm"
    return None


def _collect_marks(report: "Report") -> dict[str, Marks]:
    """Return the marks of the compared tensors that are finite on both sides."""
    rows = (row for key in ("layers", "other_changes", "lossless") for row in getattr(report, key))
    finite = (row for row in rows if getattr(row, "finite", True))
    return {row.layer_name: Marks(row.original_norm, row.original_fingerprint) for row in finite}
