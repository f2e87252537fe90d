"""AMD Quark: all its schemes of whole models that it can write."""

from pathlib import Path

import torch
from common import TOKENS, loader, run
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from torch import Tensor

SCHEMES = (
    "int4_wo_32", "int4_wo_128", "int4_wo_per_channel", "uint4_wo_32", "uint4_wo_128", "uint4_wo_per_channel", "int8",
    "fp8", "ptpc_fp8", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_fp8", "amdfp4", "amdfp4_g32", "amdfp4_global16",
    "int4_fp8", "nvfp4",
)  # fmt: skip
SETTINGS = {name: {"scheme": name} for name in SCHEMES} | {
    "uint4 awq": {"scheme": "uint4_wo_32", "algorithm": "awq"},
    "int8 smoothquant": {"scheme": "int8", "algorithm": "smoothquant"},
}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize with the template of the architecture; return the values that Quark imports, in float32."""
    loaded = loader(model).from_pretrained(model, dtype=torch.float32)
    template = LLMTemplate.get(loaded.config.model_type)
    quantizer = ModelQuantizer(template.get_config(**{"exclude_layers": ["lm_head"], **setting}))
    made = quantizer.freeze(quantizer.quantize_model(loaded, TOKENS))
    export_safetensors(made, str(folder))
    fresh = loader(model).from_pretrained(model, dtype=torch.float32)
    modules = import_model_from_safetensors(fresh, str(folder)).named_modules()
    layers = {f"{name}.weight": m for name, m in modules if getattr(m, "weight_quantizer", None) is not None}
    return {name: module.weight_quantizer(module.weight) for name, module in layers.items()}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting that leaves modules out, and gives others a scheme of their own."""
    return {"scheme": "mxfp4", "exclude_layers": [*exclude], "layer_config": dict.fromkeys(other_bits, "fp8")}


if __name__ == "__main__":
    run("amd-quark", SETTINGS, quantize, declare)
