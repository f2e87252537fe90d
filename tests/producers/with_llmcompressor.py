"""llm-compressor: the preset schemes of compressed-tensors, GPTQ, AWQ and SmoothQuant."""

from collections.abc import Callable
from pathlib import Path

import torch
from common import TOKENS, loader, run
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import Tensor
from transformers import CompressedTensorsConfig

try:
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
except ImportError:
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

WEIGHTS_ONLY = ("W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16")
CALIBRATED = ("W8A8", "W4A8", "FP8", "NVFP4", "MXFP4", "MXFP8")


def plain(scheme: str) -> list:
    """Return modifiers that only round."""
    return [QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])]


SETTINGS = {name: lambda name=name: plain(name) for name in (*WEIGHTS_ONLY, *CALIBRATED)} | {
    "GPTQ W4A16": lambda: [GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])],
    "AWQ W4A16_ASYM": lambda: [AWQModifier(), *plain("W4A16_ASYM")],
    "SmoothQuant W8A8": lambda: [SmoothQuantModifier(smoothing_strength=0.8), *plain("W8A8")],
}


def quantize(model: Path, recipe: object, folder: Path) -> dict[str, Tensor]:
    """Quantize with a few random sequences; return the values that transformers reads with run_compressed=False."""
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    rows = Dataset.from_list([{"input_ids": t[0].tolist(), "attention_mask": [1] * t.shape[1]} for t in TOKENS])
    oneshot(
        model=made,
        dataset=rows,
        recipe=recipe(),
        num_calibration_samples=len(TOKENS),
        max_seq_length=64,
        processor=None,
    )
    made.save_pretrained(folder, save_compressed=True)
    config = CompressedTensorsConfig(run_compressed=False)
    read, info = loader(model).from_pretrained(
        folder, dtype=torch.float32, quantization_config=config, output_loading_info=True
    )
    lost = info["missing_keys"]  # experts that are stored one by one: transformers fills them with random numbers
    values = {name: value for name, value in read.state_dict().items() if name not in lost}
    return {name: value for name, value in values.items() if value.dim() > 1 and value.is_floating_point()}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> Callable[[], list]:
    """Return the setting with a group of all linear layers, one of those with 8 bits, and what to ignore."""

    def group(targets: list[str], bits: int) -> dict:
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        return {"targets": targets, "weights": weights}

    groups = {"group_0": group(["Linear"], 4)} | ({"group_1": group([*other_bits], 8)} if other_bits else {})
    return lambda: [QuantizationModifier(config_groups=groups, ignore=[*exclude])]


if __name__ == "__main__":
    run("llmcompressor", SETTINGS, quantize, declare)
