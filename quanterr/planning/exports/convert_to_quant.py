"""Export of plans as JSON of name patterns and formats, for --layer-config of silveroxides/convert_to_quant."""

from collections.abc import Mapping, Sequence

from quanterr.advice.quantizers import join_names
from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.planning.exports.base import Consumer, format_json
from quanterr.util.strict_json import JsonObject

# Formats of convert_to_quant 1.3: README.md, config/layer_config.py. It writes FP8 for other formats in --layer-config.
CONVERT_TO_QUANT: dict[str, JsonObject] = {
    "fp8_tensor": {"format": "float8_e4m3fn", "scaling_mode": "tensor"},
    "fp8_row": {"format": "float8_e4m3fn_rowwise", "scaling_mode": "row"},
    "fp8_block128": {"format": "float8_e4m3fn_blockwise", "scaling_mode": "block", "block_size": 128},
    "int8_tensor": {"format": "int8_tensorwise", "scaling_mode": "tensor"},
    "int8_row": {"format": "int8_tensorwise", "scaling_mode": "row"},
    "int8_block128": {"format": "int8_blockwise", "scaling_mode": "block", "block_size": 128},
}


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    """Return a config with plain rounding, which the plan measured, that skips layers outside of the plan."""
    config: JsonObject = {"_default": {"skip": True}}
    for recipe, names in modules.items():
        how = {"skip": True} if recipe == ORIGINAL else CONVERT_TO_QUANT[recipe] | {"simple": True}
        config |= {f"^{pattern}$": how for pattern in join_names(names)}
    return format_json(config)


CONSUMER = Consumer(
    lambda recipe: recipe in CONVERT_TO_QUANT,
    _export,
    file="layers.json",
    command="convert_to_quant -i {original} --layer-config {file} --comfy_quant -o quantized.safetensors",
    reads=".safetensors",
)
