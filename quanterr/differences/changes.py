"""The comparison of the items of each kind of document."""

from collections.abc import Callable, Mapping
from math import inf, isfinite, log
from typing import Any, NamedTuple

from msgspec.structs import astuple

from quanterr.documents.comparison.same_original import describe_selections, find_other_tensor
from quanterr.documents.comparison.same_original import find_difference as of_reports
from quanterr.documents.diff.base import SAME_DB
from quanterr.documents.diff.candidates.model import (
    ImageChange,
    ItemChange,
    LayerChange,
    RecipeChange,
    StoredChange,
    WeightChange,
)
from quanterr.documents.diff.reports.model import Both, Change
from quanterr.documents.evaluation.model import find_difference as of_evaluations
from quanterr.documents.images.model import find_difference as of_images
from quanterr.documents.plan.model import Plan
from quanterr.documents.ranking.model import Ranking
from quanterr.documents.subjects import Item, compute_change

SAME = 0.01  # relative change of an output error up to which it counts as unchanged
SAME_SSIM = 1e-6


class Changes(NamedTuple):
    """The comparison of two documents of a kind."""

    item: str  # kind of items: weight, layer, pair
    # How much worse an item is, and the change; None: unchanged.
    compare: Callable[[Item, Item], tuple[float, Change | ItemChange] | None]
    find_difference: Callable[[Any, Any], str | None]  # returns why two documents are not comparable


def _compare_weight(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.output_error, now.values.output_error
    if x is None or y is None or x == y:
        return None
    by = log(y / x) if x and y else inf if y else -inf
    return (by, WeightChange(now.name, x, y, y / x if x else None)) if abs(by) > log(1 + SAME) else None


def _compare_reported_layer(was: Item, now: Item) -> tuple[float, Change] | None:
    """Return how much worse a layer is; None if its SNR is as it was, or undefined in both.

    A layer whose SNR became undefined is infinitely worse. One that became identical to the original counts as the
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
    old, new = (None if one.trouble else one.get_number("snr_db") for one in (was, now))
    return Both(now.name, old, new, compute_change(old, new), getattr(now.values, "format", None))


def _compare_ranked_layer(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    levels = was.values.snr_db, now.values.snr_db
    x, y = (inf if level is None else level for level in levels)
    if x == y or abs(y - x) <= SAME_DB:
        return None
    return x - y, LayerChange(now.name, *levels, None if None in levels else y - x)


def _compare_recipe(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    old, new = was.values, now.values
    if old.recipe == new.recipe:
        return None
    pairs = (getattr(side, key) for key in ("recipe", "bytes", "cost") for side in (old, new))
    return new.cost - old.cost, RecipeChange(now.name, *pairs)


def _compare_stored(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    old, new = was.values, now.values
    if (old.format, old.bytes) == (new.format, new.bytes):
        return None
    return float(new.bytes - old.bytes), StoredChange(now.name, old.format, new.format, old.bytes, new.bytes)


def _compare_image(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.ssim, now.values.ssim
    return None if abs(y - x) <= SAME_SSIM else (x - y, ImageChange(now.name, x, y, y - x))


def _find_ranking_difference(old: Ranking, new: Ranking) -> str | None:
    return _find_other_original(old, new) or (None if old.sample == new.sample else "it has a different sample of rows")


def _find_plan_difference(old: Plan, new: Plan) -> str | None:
    if old.measure != new.measure:
        return f"the cost is {old.measure} there, {new.measure} here"
    why = find_other_tensor(old.layers, new.layers)
    return f"it has a different original: {why}" if why else _find_other_original(old, new)


def _find_other_original(old: Ranking | Plan, new: Ranking | Plan) -> str | None:
    if old.original_bytes != new.original_bytes:
        return f"it has a different original: {old.original_bytes:,} bytes there, {new.original_bytes:,} here"
    if old.selection.patterns != new.selection.patterns:
        return describe_selections(old.selection.patterns, new.selection.patterns)
    return None


CHANGES: Mapping[str, Changes] = {
    "report": Changes("layer", _compare_reported_layer, of_reports),
    "evaluation": Changes("weight", _compare_weight, of_evaluations),
    "ranking": Changes("layer", _compare_ranked_layer, _find_ranking_difference),
    "plan": Changes("layer", _compare_recipe, _find_plan_difference),
    "inspection": Changes("weight", _compare_stored, lambda old, new: None),
    "images": Changes("pair", _compare_image, of_images),
}
