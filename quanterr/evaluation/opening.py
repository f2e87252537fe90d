"""The candidates: stored checkpoints, and the original quantized by recipes and plans."""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.base import RECIPE
from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.documents.reading import read_stored
from quanterr.errors import UsageError
from quanterr.evaluation.models.gguf_original import find_parts
from quanterr.recipes import Recipe, parse_recipe, parse_recipes
from quanterr.recipes.names import split_at_commas
from quanterr.recipes.quantized_file import mix_recipes, quantize_by
from quanterr.selection import LayerSelection
from quanterr.util.text import display

PLAN = ".json"  # suffix of a plan


class Given(NamedTuple):
    """The requested candidates, before the original is open."""

    stored: Sequence[str | os.PathLike[str] | Checkpoint]
    recipes: Sequence[Recipe]
    plans: dict[str, Plan]

    @property
    def names(self) -> list[str]:
        """The names of all candidates: paths of files and plans, and names of recipes."""
        paths = [side.path if isinstance(side, Checkpoint) else os.fspath(side) for side in self.stored]
        return [*paths, *(recipe.name for recipe in self.recipes), *self.plans]

    def add_made(self, stored: Iterable[Checkpoint], original: Checkpoint) -> list[Checkpoint]:
        """Return all candidates in the order of the names: the open ``stored`` ones, and those made of the original.

        Raises:
            UsageError: a plan was made for another original.
        """
        return [
            *stored,
            *quantize_by(self.recipes, original, LayerSelection(())),
            *(_quantize_as_planned(plan, name, original) for name, plan in self.plans.items()),
        ]


def read_given(
    stored: Sequence[str | os.PathLike[str] | Checkpoint], against: str | Plan | Iterable[str | Plan]
) -> Given:
    """Read plans and recipes, without opening checkpoints.

    Raises:
        ReportError: a file is not a plan.
        UsageError: a recipe is unknown.
    """
    plans, words = _read_plans_and_recipes(against)
    return Given(stored, parse_recipes(words) if words else [], plans)


def is_of_recipe(checkpoint: Checkpoint) -> bool:
    """Return whether a candidate is the original quantized by one recipe."""
    return checkpoint.kind == RECIPE and not checkpoint.path.endswith(PLAN)


def _read_plans_and_recipes(against: str | Plan | Iterable[str | Plan]) -> tuple[dict[str, Plan], list[str]]:
    """Return plans, by path or goal, and names of recipes.

    Raises:
        ReportError: a file is not a plan.
    """
    given = [against] if isinstance(against, str | Plan) else list(against)
    plans: dict[str, Plan] = {}
    for given_item in (given_item for given_item in given if isinstance(given_item, Plan)):
        same = sum(other.goal == given_item.goal for other in plans.values())
        plans[f"{given_item.goal} ({same + 1}){PLAN}" if same else f"{given_item.goal}{PLAN}"] = given_item
    words = [given_item for given_item in given if isinstance(given_item, str)]
    if any(PLAN in word for word in words):
        words = [word for given_item in words for word in split_at_commas(given_item)]
    plans |= {word: read_stored(word, Plan) for word in words if word.endswith(PLAN)}
    return plans, [word for word in words if not word.endswith(PLAN)]


def _quantize_as_planned(plan: Plan, path: str, original: Checkpoint) -> Checkpoint:
    """Return the original with each layer quantized as planned.

    Raises:
        UsageError: the plan was made for another original.
    """
    parts, recipes = find_parts(original), dict[str, Recipe]()
    for layer in plan.layers:
        names = [layer.layer_name] if layer.layer_name in original.entries else parts.get(layer.layer_name, [])
        if sum(original.entries[name].n for name in names) != layer.elements:
            problem = f"has the shape {list(original.entries[names[0]].shape)}" if names else "is not there"
            raise UsageError(
                f"--against {display(path)}: it was made for another original: {layer.display_name} {problem}, where "
                f"{layer.elements:,} elements are planned; plan again, from this one"
            )
        if layer.recipe != ORIGINAL:
            recipes |= dict.fromkeys(names, parse_recipe(layer.recipe))
    made, left = mix_recipes(original, recipes, path)
    if left:
        raise UsageError(f"--against {display(path)}: {display(left[0].name)} cannot be stored: {left[0].reason}")
    return made
