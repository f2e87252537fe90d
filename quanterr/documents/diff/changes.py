"""The comparison of the items of each kind of document with candidates, and its view in diffs."""

from collections.abc import Callable, Mapping, Sequence
from math import inf, log
from typing import Any, NamedTuple

from quanterr.documents.comparison.same_original import describe_selections, find_other_tensor
from quanterr.documents.diff.base import SAME_DB
from quanterr.documents.diff.candidates.model import (
    ImageChange,
    ItemChange,
    LayerChange,
    RecipeChange,
    StoredChange,
    WeightChange,
)
from quanterr.documents.evaluation.model import find_difference as of_evaluations
from quanterr.documents.images.model import find_difference as of_images
from quanterr.documents.plan.model import Plan
from quanterr.documents.ranking.model import Ranking
from quanterr.documents.subjects import Item
from quanterr.outputs.formatting import format_if_known, format_percent, format_size_change
from quanterr.outputs.sections import CellColumn, Column

SAME = 0.01  # relative change of an output error up to which it counts as unchanged
SAME_SSIM = 1e-6
ABOUT = (
    "From two stored results. ± is a standard error as if both had read different tokens. Within chance: the change is "
    "no larger than different tokens would cause."
)


class Changes(NamedTuple):
    """The comparison of two documents of a kind, and the view of their changed items."""

    item: str  # kind of items: weight, layer, pair
    worse: str  # "12 layers …" above the items that are worse, and those that are better
    better: str
    compare: Callable[[Item, Item], tuple[float, ItemChange] | None]  # how much worse an item is; None: unchanged
    find_difference: Callable[[Any, Any], str | None]  # returns why two documents are not comparable
    columns: Sequence[CellColumn[Any]]
    ends: Callable[[Any], tuple[object, object, object]]  # the old value, the new one and the change, for CSV
    about: str = ABOUT


def _compare_weight(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.output_error, now.values.output_error
    if x is None or y is None or x == y:
        return None
    by = log(y / x) if x and y else inf if y else -inf
    return (by, WeightChange(now.name, x, y, y / x if x else None)) if abs(by) > log(1 + SAME) else None


def _compare_layer(was: Item, now: Item) -> tuple[float, ItemChange] | None:
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


def _format_bytes(one: RecipeChange | StoredChange) -> str:
    return format_size_change(one.new_bytes - one.old_bytes)


CHANGES: Mapping[str, Changes] = {
    "evaluation": Changes(
        "weight",
        "with worse output",
        "with better output",
        _compare_weight,
        of_evaluations,
        columns=(
            (Column("old output error", 1), lambda one: format_percent(one.old_output_error)),
            (Column("new output error", 2), lambda one: format_percent(one.new_output_error)),
            (Column("ratio", 0), lambda one: "-" if one.ratio is None else f"× {one.ratio:.3g}"),
        ),
        ends=lambda one: (one.old_output_error, one.new_output_error, one.new_output_error - one.old_output_error),
    ),
    "ranking": Changes(
        "layer",
        "worse",
        "better",
        _compare_layer,
        _find_ranking_difference,
        columns=(
            (Column("old dB", 1), lambda one: format_if_known(one.old_snr_db, otherwise="exact")),
            (Column("new dB", 2), lambda one: format_if_known(one.new_snr_db, otherwise="exact")),
            (Column("change dB", 0), lambda one: format_if_known(one.change_db, "+.4g")),
        ),
        ends=lambda one: (one.old_snr_db, one.new_snr_db, one.change_db),
        about="From two stored rankings. A positive change of SNR is better. Weight error is not task accuracy.",
    ),
    "plan": Changes(
        "layer",
        "changed, at more cost",
        "changed, at no more cost",
        _compare_recipe,
        _find_plan_difference,
        columns=(
            (Column("old recipe", 0, right=False), lambda one: one.old_recipe),
            (Column("new recipe", 1, right=False), lambda one: one.new_recipe),
            (Column("bytes", 3), _format_bytes),
            (Column("cost", 2), lambda one: f"{one.new_cost - one.old_cost:+.3g}"),
        ),
        ends=lambda one: (one.old_recipe, one.new_recipe, one.new_bytes - one.old_bytes),
        about="From two stored plans. Costs are predicted, in the same measure for both.",
    ),
    "inspection": Changes(
        "weight",
        "changed, with more bytes",
        "changed, with no more bytes",
        _compare_stored,
        lambda old, new: None,
        columns=(
            (Column("old format", 0, right=False), lambda one: one.old_format or "unread"),
            (Column("new format", 1, right=False), lambda one: one.new_format or "unread"),
            (Column("bytes", 2), _format_bytes),
        ),
        ends=lambda one: (one.old_format, one.new_format, one.new_bytes - one.old_bytes),
        about="From two stored inspections: formats and sizes, no values.",
    ),
    "images": Changes(
        "pair",
        "further from the original",
        "nearer to it",
        _compare_image,
        of_images,
        columns=(
            (Column("old SSIM", 1), lambda one: f"{one.old_ssim:.4g}"),
            (Column("new SSIM", 2), lambda one: f"{one.new_ssim:.4g}"),
            (Column("change", 0), lambda one: f"{one.change:+.3g}"),
        ),
        ends=lambda one: (one.old_ssim, one.new_ssim, one.change),
        about="From two stored results. ± is a standard error as if both had compared different images.",
    ),
}
