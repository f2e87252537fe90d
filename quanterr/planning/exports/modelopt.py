"""Export of plans as YAML with a weight-only config for modelopt.torch.quantization.quantize."""

import json
from collections.abc import Mapping, Sequence

from quanterr.documents.plan.model import ORIGINAL, Plan
from quanterr.planning.exports.base import INTEGER, Consumer

# ModelOpt's quantizers: modelopt_recipes/configs/numerics of nvidia-modelopt 0.47.
MODELOPT = {
    "fp8_tensor": "{num_bits: e4m3, axis: null}",
    "fp8_row": "{num_bits: e4m3, axis: 0}",
    "fp8_block128": "{num_bits: e4m3, block_sizes: {-1: 128, -2: 128}}",
    "int8_tensor": "{num_bits: 8, axis: null}",
    "int8_row": "{num_bits: 8, axis: 0}",
    "mxfp8": "{num_bits: e4m3, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}}",
    "mxfp4": "{num_bits: e2m1, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}}",
    "nvfp4": "{num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e4m3}}",
}


def _export(plan: Plan, modules: Mapping[str, Sequence[str]]) -> str:
    """Return the plan as YAML, because the axes of block_sizes are numeric keys, which JSON does not have."""
    lines = ["quant_cfg:", '- {quantizer_name: "*", enable: false}']
    for recipe, names in modules.items():
        if recipe == ORIGINAL:
            continue
        if match := INTEGER.fullmatch(recipe):
            scales = f"block_sizes: {{-1: {match['group']}, type: static}}" if match["group"] else "axis: 0"
            config = f"{{num_bits: {match['bits']}, {scales}}}"
        else:
            config = MODELOPT[recipe]
        quantizers = [json.dumps(f"{name}.weight_quantizer") for name in names]
        lines += [f"- {{quantizer_name: {quantizer}, cfg: {config}}}" for quantizer in quantizers]
    return "\n".join([*lines, "algorithm: max", ""])


def _writes(recipe: str) -> bool:
    if match := INTEGER.fullmatch(recipe):
        return match["bits"] in ("4", "8") and not match["asym"]
    return recipe in MODELOPT


CONSUMER = Consumer(
    _writes,
    _export,
    file="modelopt.yaml",
    python="from modelopt.torch import export, quantization; "
    "from modelopt.torch.opt.config_loader import load_config; "
    "from transformers import AutoModelForCausalLM; "
    "model = AutoModelForCausalLM.from_pretrained({original}, dtype='auto'); "
    "quantization.quantize(model, load_config({file})); "
    "export.export_hf_checkpoint(model, export_dir='quantized')",
)
