"""Subjects of a plan for rules: the plan itself with its size, cost and layers; and how two plans are compared."""

from dataclasses import dataclass

from quanterr.documents.comparison.same_original import find_other_source, find_other_tensor
from quanterr.documents.diff.base import Changes
from quanterr.documents.diff.candidates.model import ItemChange
from quanterr.documents.plan.model import Plan
from quanterr.documents.subjects import Item, Subject, Vocabulary
from quanterr.metrics.scores import collect_scores

OF_PLANS = ("bytes", "bits_per_weight", "cost", "bound", "snr_db", "least_bytes", "unplanned_bytes", "measured_kld")
OF_LAYERS = ("elements", "bytes", "bits_per_weight", "snr_db", "cost")

VOCABULARY = Vocabulary(
    "plan",
    dict.fromkeys(OF_LAYERS, "layer"),
    OF_PLANS,
    "bits_per_weight <= 4.5",
    done="the plan is complete",
    scores=collect_scores(Plan),
)


def list_subjects(plan: Plan) -> list[Subject]:
    """Return the plan as the only subject."""
    layers = [Item(layer.layer_name, "layer", layer) for layer in plan.layers]
    return [
        Subject(VOCABULARY, layers, {name: getattr(plan, name) for name in OF_PLANS}, patterns=plan.selection.patterns)
    ]


@dataclass(slots=True)
class RecipeChange(ItemChange):
    """A layer whose planned recipe changed."""

    old_recipe: str
    new_recipe: str
    old_bytes: int
    new_bytes: int
    old_cost: float
    new_cost: float


def _compare_recipes(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    old, new = was.values, now.values
    if old.recipe == new.recipe:
        return None
    pairs = (getattr(side, key) for key in ("recipe", "bytes", "cost") for side in (old, new))
    return new.cost - old.cost, RecipeChange(now.name, *pairs)


def _find_difference(old: Plan, new: Plan) -> str | None:
    if old.measure != new.measure:
        return f"the cost is {old.measure} there, {new.measure} here"
    why = find_other_tensor(old.layers, new.layers)
    return f"it has a different original: {why}" if why else find_other_source(old, new)


CHANGES = Changes("layer", _compare_recipes, _find_difference)
