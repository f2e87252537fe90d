"""HQQ: 1 to 8 bits, as transformers saves it."""

from pathlib import Path

import torch
from common import run
from hqq.core.quantize import HQQLinear
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, HqqConfig

SETTINGS = {f"{bits} bits": {"nbits": bits, "group_size": 64} for bits in (8, 4, 3, 2, 1)}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """In float32; what its modules dequantize to."""
    loader = AutoModelForSeq2SeqLM if "t5" in model.name else AutoModelForCausalLM
    made = loader.from_pretrained(
        model, dtype=torch.float32, device_map="cpu", quantization_config=HqqConfig(**setting)
    )
    made.save_pretrained(folder)
    modules = {name: module for name, module in made.named_modules() if isinstance(module, HQQLinear)}
    return {f"{name}.weight": module.dequantize() for name, module in modules.items()}


if __name__ == "__main__":
    run("hqq", SETTINGS, quantize)
