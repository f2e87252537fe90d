"""NVIDIA ModelOpt: its presets, written as checkpoints of Hugging Face."""

from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from common import TOKENS, loader, run
from modelopt.torch.export import export_hf_checkpoint
from torch import Tensor

NAMES = (
    "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "INT8_SMOOTHQUANT_CFG",
    "INT8_WEIGHT_ONLY_CFG", "INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "NVFP4_DEFAULT_CFG", "NVFP4_AWQ_LITE_CFG",
    "MXFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG",
)  # fmt: skip
SETTINGS = {name.removesuffix("_CFG"): getattr(mtq, name) for name in NAMES}


def quantize(model: Path, config: dict, folder: Path) -> dict[str, Tensor]:
    """Calibrate with a few random sequences; return the weights that ModelOpt simulates."""
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    made = mtq.quantize(made, config, lambda m: [m(tokens) for tokens in TOKENS])
    values = {}
    for path, module in made.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and getattr(quantizer, "is_enabled", False):
            factors = getattr(module.input_quantizer, "_pre_quant_scale", None)
            weight = quantizer(module.weight).detach().clone()
            values[f"{path}.weight"] = weight if factors is None else weight * factors
    export_hf_checkpoint(made, export_dir=str(folder))
    return values


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting whose last rules leave modules out, and give others INT8 instead of FP8."""
    rules = [*SETTINGS["FP8_DEFAULT"]["quant_cfg"]]
    for name in other_bits:
        rules += [
            {"quantizer_name": f"{name}.weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
            {"quantizer_name": f"{name}.input_quantizer", "enable": False},
        ]
    rules += [{"quantizer_name": f"{name}.*", "enable": False} for name in exclude]
    return SETTINGS["FP8_DEFAULT"] | {"quant_cfg": rules}


if __name__ == "__main__":
    run("nvidia-modelopt", SETTINGS, quantize, declare, simulated=True)
