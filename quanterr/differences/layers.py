"""The comparison of layers of two reports; items of other kinds of documents are compared in their ``values.py``."""

from math import inf, isfinite

from msgspec.structs import astuple

from quanterr.documents.comparison.same_original import find_difference
from quanterr.documents.diff.base import SAME_DB, Changes
from quanterr.documents.diff.reports.model import Both, Change
from quanterr.documents.subjects import Item, compute_change


def _compare_reported_layer(was: Item, now: Item) -> tuple[float, Change] | None:
    """Return how much worse a layer became, and the change; None if its SNR is equal, or undefined in both.

    A layer whose SNR became undefined counts as infinitely worse, and one that became identical to the original as the
    smallest improvement.
    """
    _, old, new, by, _ = astuple(compare_levels(was, now))
    if (old is None and new is None) or (by is not None and abs(by) <= SAME_DB):
        return None
    old_db, new_db, by_db = (v if v is not None and isfinite(v) else None for v in (old, new, by))
    reason = _find_reason(was, now, old, new) if by_db is None else None
    excess = (getattr(weight.values, "excess_db", None) for weight in (was, now))
    change = Change(now.name, old_db, new_db, by_db, reason, *excess)
    if new is None or (by is not None and by < 0):
        return inf if by is None else -by, change
    return 0.0 if new_db is None else -inf if by is None else -by, change


def _find_reason(was: Item, now: Item, before: float | None, after: float | None) -> str:
    if after is None:
        return now.trouble or "its SNR is undefined"
    if before is None:
        return f"before: {was.trouble or 'its SNR was undefined'}"
    if inf in (before, after):
        return f"{'was' if before == inf else 'is'} identical to the original"
    return f"its SNR {'was' if before == -inf else 'is'} minus infinity: the original is all zeros"


def compare_levels(was: Item, now: Item) -> Both:
    """Return the SNR of a layer in two reports."""
    old, new = (None if item.trouble else item.get_number("snr_db") for item in (was, now))
    return Both(now.name, old, new, compute_change(old, new), getattr(now.values, "format", None))


REPORTED = Changes("layer", _compare_reported_layer, find_difference)
