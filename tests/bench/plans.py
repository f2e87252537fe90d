"""The real cost of plans of equal size by several measures, and of one recipe for all layers."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import quanterr
from quanterr.checkpoints import Checkpoint
from quanterr.recipes import parse_recipe
from quanterr.recipes.quantized_file import mix_recipes

Measure = Callable[[Sequence[Checkpoint], Sequence[str]], dict[str, float]]  # plans, recipes for all → cost by name


def show_plans(
    original: Checkpoint, sensitivity: Path, recipes: Sequence[str], budgets: Sequence[float], measure: Measure,
    **options: Any,
) -> None:  # fmt: skip
    """Print the measured cost of plans of ``budgets`` bits per weight, as a table in Markdown."""
    fields = json.loads(sensitivity.read_text())
    fields |= {"weights": [{"layer_name": name, "alpha": 1.0} for name in original.entries], "recipes": {}}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as evenly:
        evenly.write(json.dumps(fields))
        evenly.flush()
        ways: dict[str, dict[str, Any]] = {
            "NMSE": {"sensitivity": Path(evenly.name)},
            "squared error": {},
            "sensitivity": {"sensitivity": sensitivity},
        }
        options |= {"to": recipes, "device": "cpu", "same_in": "fused"}
        candidates, best, predicted = [], [], []
        for bits in budgets:
            for title, way in ways.items():
                plan = quanterr.plan(original, bits=bits, **way, **options)
                chosen = {layer.layer_name: layer.recipe for layer in plan.layers if layer.recipe != "original"}
                named = {name: parse_recipe(recipe) for name, recipe in chosen.items()}
                candidates.append(mix_recipes(original, named, f"{bits} {title}")[0])
            predicted.append(plan.cost)
            fitting = [uniform_plan for uniform_plan in plan.uniform if uniform_plan.fits]
            best.append(min(fitting, key=lambda plan_: plan_.cost).recipe if fitting else None)
    cost = measure(candidates, [recipe for recipe in dict.fromkeys(best) if recipe is not None])
    ways_told = " | ".join(f"plan by {title}" for title in ways)
    print(f"\n| bits per weight | one recipe for all | {ways_told} | predicted ÷ measured |")
    print("|---|---|---|---|---|---|")
    for bits, recipe, value in zip(budgets, best, predicted, strict=True):
        first = "none fits" if recipe is None else f"{cost[recipe]:.4g} ({recipe})"
        measured = " | ".join(f"{cost[f'{bits} {title}']:.4g}" for title in ways)
        print(f"| {bits} | {first} | {measured} | {value / cost[f'{bits} sensitivity']:.2f} |")
