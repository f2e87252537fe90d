"""HQQ: 1 to 8 bits, as it writes safetensors itself."""

from pathlib import Path

import torch
from common import loader, run
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from torch import Tensor

SETTINGS = {f"{bits} bits": {"nbits": bits, "group_size": 64} for bits in (8, 4, 3, 2, 1)} | {
    "4 bits, columns": {"nbits": 4, "group_size": 64, "axis": 0},
}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize in float32; return the values that HQQ's modules dequantize."""
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    config = BaseQuantizeConfig(**{"axis": 1, **setting})
    AutoHQQHFModel.quantize_model(made, quant_config=config, compute_dtype=torch.float32, device="cpu")
    made.config.save_pretrained(folder)  # HQQ adds to the config, but does not write it
    AutoHQQHFModel.save_to_safetensors(made, str(folder), verbose=False)
    modules = {name: module for name, module in made.named_modules() if isinstance(module, HQQLinear)}
    return {f"{name}.weight": module.dequantize() for name, module in modules.items()}


if __name__ == "__main__":
    run("hqq", SETTINGS, quantize)
