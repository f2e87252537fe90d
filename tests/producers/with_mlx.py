"""MLX, by mlx-lm: integers of 3 to 8 bits, MXFP4, MXFP8, NVFP4."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from common import run
from mlx_lm import convert
from mlx_lm.utils import load_model
from torch import Tensor

SETTINGS = {f"{bits} bits": {"q_bits": bits, "q_group_size": 32} for bits in (8, 6, 5, 4, 3, 2)} | {
    "mxfp4": {"q_mode": "mxfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
    "nvfp4": {"q_mode": "nvfp4"},
}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize in bfloat16, as mlx-lm does; return the values that its modules dequantize."""
    options = dict(setting)
    left_out = options.pop("left_out", ())
    convert(str(model), mlx_path=str(folder), quantize=True, **options)
    note_left_out(folder / "config.json", left_out)
    loaded, _ = load_model(folder)
    values = {}
    for name, module in loaded.named_modules():
        if "scales" in module:
            biases = module.get("biases")  # only of integers, whose scales are numbers; in bfloat16 it would round
            scales = module.scales if biases is None else module.scales.astype(mx.float32)
            biases = None if biases is None else biases.astype(mx.float32)
            weight = mx.dequantize(module.weight, scales, biases, module.group_size, module.bits, module.mode)
            values[f"{name}.weight"] = torch.from_numpy(np.array(weight.astype(mx.float32)))
    return values


def note_left_out(config: Path, names: tuple[str, ...]) -> None:
    """Note the modules that were left out as mlx-lm's loader, but not its converter, knows it."""
    declared = json.loads(config.read_text())
    for key in ("quantization", "quantization_config"):
        declared[key] |= dict.fromkeys(names, False)
    config.write_text(json.dumps(declared))


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting that decides by the path of each module; mlx-lm writes down all that is no plain True."""

    def decide(path: str, module: object) -> bool | dict:
        return path not in exclude and {"group_size": 32, "bits": 8 if path in other_bits else 4}

    return SETTINGS["4 bits"] | {"quant_predicate": decide, "left_out": exclude}


if __name__ == "__main__":
    run("mlx-lm", SETTINGS, quantize, declare)
