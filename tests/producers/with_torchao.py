"""torchao, by transformers: integers and FP8 of weights alone and with activations, MX and NVFP4."""

from pathlib import Path

import torch
from common import loader, run
from torch import Tensor
from torchao import quantization as q
from transformers import TorchAoConfig

SETTINGS = {
    "int8 weight-only": lambda: q.Int8WeightOnlyConfig(version=2),
    "int8 dynamic": lambda: q.Int8DynamicActivationInt8WeightConfig(version=2),
    "int4 weight-only": lambda: q.Int4WeightOnlyConfig(group_size=32),
    "intx 4 bits": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=q.PerGroup(32)),
    "intx 2 bits": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=q.PerGroup(32)),
    "float8 weight-only": lambda: q.Float8WeightOnlyConfig(),
    "float8 rows": lambda: q.Float8DynamicActivationFloat8WeightConfig(granularity=q.PerRow()),
}


def quantize(model: Path, setting: object, folder: Path) -> dict[str, Tensor]:
    """Quantize in bfloat16 and write safetensors; return the values that torchao's tensors dequantize."""
    made = loader(model).from_pretrained(model, dtype=torch.bfloat16, quantization_config=TorchAoConfig(setting()))
    made.save_pretrained(folder)
    tensors = {
        name: value for name, value in made.state_dict().items() if hasattr(value, "dequantize") and value.dim() > 1
    }
    return {name: value.dequantize() for name, value in tensors.items() if type(value) is not Tensor}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> object:
    """Return the setting with a configuration for each module, which is none for those left out."""
    four, eight = SETTINGS["intx 4 bits"](), SETTINGS["int8 weight-only"]()
    of_each = {**dict.fromkeys(other_bits, eight), **dict.fromkeys(exclude), "_default": four}
    return lambda: q.FqnToConfig(of_each)


if __name__ == "__main__":
    run("torchao", SETTINGS, quantize, declare)
