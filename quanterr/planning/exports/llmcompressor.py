"""Export of plans as a recipe of llmcompressor, in JSON, which is also YAML: config groups, and ignored modules."""

from collections.abc import Iterable, Mapping, Sequence

from quanterr.advice.quantizers import join_names
from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.planning.exports.base import HEAD, INTEGER, Consumer, format_json, list_kept_modules
from quanterr.util.strict_json import JsonObject


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    groups = {
        f"group_{n}": {"targets": _match_exactly(names), **_make_config_group(recipe)}
        for n, (recipe, names) in enumerate((r, names) for r, names in modules.items() if r != ORIGINAL)
    }
    kept = list_kept_modules(modules)
    ignore = [*(name for name in kept if name == HEAD), *_match_exactly(name for name in kept if name != HEAD)]
    modifier = {"QuantizationModifier": {"ignore": ignore, "config_groups": groups}}
    return format_json({"quant_stage": {"quant_modifiers": modifier}})


def _match_exactly(names: Iterable[str]) -> list[str]:
    """Return targets that match these modules and no others."""
    return [f"re:^{pattern}$" for pattern in join_names(names)]


def _make_config_group(recipe: str) -> JsonObject:
    """Return a config group of compressed-tensors, without its targets."""
    dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    if match := INTEGER.fullmatch(recipe):
        group = match["group"]
        weights = {"num_bits": int(match["bits"]), "type": "int", "symmetric": not match["asym"]}
        return {
            "weights": weights | ({"strategy": "group", "group_size": int(group)} if group else {"strategy": "channel"})
        }
    if recipe.startswith("fp8_"):
        strategy = {"fp8_row": "channel", "fp8_tensor": "tensor"}[recipe]
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        return {"weights": weights, "input_activations": dynamic}
    group, scale = (16, "torch.float8_e4m3fn") if recipe == "nvfp4" else (32, "torch.uint8")
    strategy = "tensor_group" if recipe == "nvfp4" else "group"
    weights = {"num_bits": 8 if recipe == "mxfp8" else 4, "type": "float", "symmetric": True, "strategy": strategy}
    return {"weights": weights | {"group_size": group, "scale_dtype": scale, "zp_dtype": scale}}


def _writes(recipe: str) -> bool:
    return bool(INTEGER.fullmatch(recipe)) or recipe in ("fp8_row", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8")


CONSUMER = Consumer(
    _writes,
    _export,
    file="recipe.yaml",
    python="from llmcompressor import oneshot; oneshot(model={original}, recipe={file}, output_dir='quantized')",
)
