"""Two reports: whether they may be compared at all, and what changed from one to the other."""

from collections.abc import Collection, Iterator
from math import copysign, inf, isclose, isinf
from typing import Any, NamedTuple

from quanterr.errors import UsageError
from quanterr.report import FINGERPRINT, NORM
from quanterr.report.reading import Extract
from quanterr.report.values import NEEDS, Values
from quanterr.util.text import display

FILES = {"importance": "importance matrix", "sensitivity": "sensitivity"}
NORM_TOLERANCE = 1e-6  # of norms on two devices: chunks are summed in float32 on a device, good to 1e-8


def difference(old: Extract, new: Extract) -> str | None:
    """Why numbers of the two do not belong together; None where they do. Both need :data:`NORM`.

    They have to be of the same original, selection, outlier threshold and version of the metrics. The original is
    known by its number of tensors, its bytes and the norm and some values of every tensor that both compare and that is
    finite in both: a norm leaves out what is not.
    """
    for key, what in (("tensors", "tensors"), ("bytes", "bytes")):
        if old["original"][key] != new["original"][key]:
            found = f"{old['original'][key]:,} {what} there, {new['original'][key]:,} here"
            return f"it has a different original: {found}"
    if old["selection"] != new["selection"]:
        shown = [display(" ".join(report["selection"]["patterns"]) or "all layers") for report in (old, new)]
        return f"it has a different selection: {shown[0]} there, {shown[1]} here"
    for key, what in (("outlier_threshold", "outlier threshold"), ("metrics_version", "version of the metrics")):
        before, after = (report["settings"][key] for report in (old, new))
        if before != after:
            return f"it has another {what}: {before} there, {after} here"
    known = {row["layer_name"]: row for row in _compared(old)}
    for row in _compared(new):
        before = known.get(row["layer_name"])
        if before and (why := other_tensor(row["layer_name"], _marks(before), _marks(row))):
            return f"it has a different original: {why}"
    return None


class Marks(NamedTuple):
    """What a tensor of an original is known again by; None: not known."""

    norm: float | None
    fingerprint: str | None


def _marks(row: dict[str, Any]) -> Marks:
    return Marks(row[NORM], row.get(FINGERPRINT))


def other_tensor(name: str, there: Marks, here: Marks) -> str | None:
    """Why a tensor of an original is another one here than there; None where nothing says so."""
    if there.norm is not None and here.norm is not None and not isclose(there.norm, here.norm, rel_tol=NORM_TOLERANCE):
        return f"the norm of the original {display(name)} is {there.norm} there, {here.norm} here"
    if there.fingerprint and here.fingerprint and there.fingerprint != here.fingerprint:
        return f"the original {display(name)} has other values there than here, though the same norm"
    return None


def _compared(report: Extract) -> Iterator[dict[str, Any]]:
    """Its tensors that are finite on both sides."""
    rows = (row for key in ("layers", "other_changes", "lossless") for row in report[key])
    return (row for row in rows if row.get("finite", True))


def check_usable(baseline: Values) -> None:
    """Refuse a baseline that cannot be relied on as a whole; its layers that cannot stand against themselves alone.

    Raises:
        UsageError: it is incomplete or inconclusive, and not for the sake of some layers.
    """
    whole = [found for found in baseline.report["findings"] if found["severity"] == "error" and found["layer"] is None]
    if not baseline.report["complete"]:
        why = "its run was interrupted"
    elif baseline.unreliable and (whole or not any(weight.trouble for weight in baseline.weights)):
        why = f"it is inconclusive: {display((whole[0]['message'] if whole else baseline.unreliable[0]), 2000)}"
    else:
        return
    raise UsageError(f"the baseline is not reliable: {why}; compare again, or give another report")


def check_baseline(baseline: Values, values: Values, metrics: Collection[str]) -> None:
    """Refuse a baseline that says nothing about these metrics of this report.

    Raises:
        UsageError: as for :func:`check_usable`, or :func:`difference` finds one, or a metric is weighted otherwise.
    """
    check_usable(baseline)
    why = difference(baseline.report, values.report)
    for setting in sorted({NEEDS[metric] for metric in metrics if metric in NEEDS}) if why is None else ():
        why = why or _other_file(setting, baseline.report, values.report)
    if why:
        raise UsageError(f"the baseline does not apply to this report: {why}")


def _other_file(setting: str, old: Extract, new: Extract) -> str | None:
    """Known by the file's name alone: its folder may be another on another machine."""
    paths = (report["settings"].get(setting) for report in (old, new))
    before, after = (display(path.replace("\\", "/").rpartition("/")[2]) if path else "none" for path in paths)
    return f"it has another {FILES[setting]}: {before} there, {after} here" if before != after else None


def change(old: float | None, new: float | None, relative: bool) -> float | None:
    """New less old, divided by ``|old|`` if ``relative``. Of two equal values 0, also where both are infinite."""
    if old is None or new is None:
        return None
    if old == new:
        return 0.0
    if not relative:
        return new - old
    return copysign(inf, new - old) if not old or isinf(old) else (new - old) / abs(old)
