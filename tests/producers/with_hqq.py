"""HQQ: 1 to 8 bits, as it writes safetensors itself."""

from pathlib import Path

import torch
from common import loader, run
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.base import name_to_linear_tag
from hqq.models.hf.base import AutoHQQHFModel
from torch import Tensor
from transformers import HqqConfig

SETTINGS = {f"{bits} bits": {"nbits": bits, "group_size": 64} for bits in (8, 4, 3, 2, 1)} | {
    "4 bits, columns": {"nbits": 4, "group_size": 64, "axis": 0},
}
KINDS = (*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down")))


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize in float32; return the values that HQQ's modules dequantize."""
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    config = setting.get("quant_config") or BaseQuantizeConfig(**{"axis": 1, **setting})
    AutoHQQHFModel.quantize_model(made, quant_config=config, compute_dtype=torch.float32, device="cpu")
    if "quant_config" in setting:
        made.config.quantization_config = setting  # transformers writes this file, HQQ alone does not
    made.config.save_pretrained(folder)  # HQQ adds to the config, but does not write it
    AutoHQQHFModel.save_to_safetensors(made, str(folder), verbose=False)
    modules = {name: module for name, module in made.named_modules() if isinstance(module, HQQLinear)}
    return {f"{name}.weight": module.dequantize() for name, module in modules.items()}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return transformers' configuration, by kinds of modules: HQQ does not tell blocks apart."""
    left_out, finer = ({name_to_linear_tag(name) for name in names} for names in (exclude, other_bits))
    kinds = {
        tag: {"nbits": 8 if tag in finer else 4, "group_size": 64, "axis": 1} for tag in KINDS if tag not in left_out
    }
    return HqqConfig(dynamic_config=kinds, skip_modules=sorted(left_out)).to_dict()


if __name__ == "__main__":
    run("hqq", SETTINGS, quantize, declare)
