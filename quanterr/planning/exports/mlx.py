"""Export of plans as JSON with bits and group size for each module, which a quant_predicate of mlx-lm returns."""

from collections.abc import Mapping, Sequence

from quanterr.documents.plan.model import Plan
from quanterr.planning.exports.base import Consumer, format_json
from quanterr.recipes.names import MLX
from quanterr.util.strict_json import JsonObject


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    predicate: JsonObject = {}
    for recipe, names in modules.items():
        match = MLX.fullmatch(recipe)
        how = {"group_size": int(match["group"]), "bits": int(match["bits"])} if match else False
        predicate |= dict.fromkeys(names, how)
    return format_json(predicate)


CONSUMER = Consumer(
    lambda recipe: bool(MLX.fullmatch(recipe)),
    _export,
    file="mlx.json",
    python="import json; from mlx_lm import convert; plan = json.load(open({file})); "
    "convert({original}, 'quantized', quantize=True, quant_predicate=lambda name, module: plan.get(name, False))",
)
