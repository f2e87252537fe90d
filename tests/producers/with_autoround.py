"""AutoRound: its own format and the formats of GPTQ and llm-compressor; symmetric codes of the full range."""

from pathlib import Path

import torch
from auto_round import AutoRound
from common import loader, run
from torch import Tensor
from transformers import AutoTokenizer

SETTINGS = {
    "W4A16 auto_round": ("W4A16", "auto_round", {}),
    "W2A16 auto_round": ("W2A16", "auto_round", {}),
    "W4A16 auto_gptq": ("W4A16", "auto_gptq", {}),
    "W4A16 llm_compressor": ("W4A16", "llm_compressor", {}),
    "NVFP4 llm_compressor": ("NVFP4", "llm_compressor", {}),
}

WORDS = [" ".join(f"w{n % 512}" for n in range(seed, seed + 64)) for seed in range(16)]
CALIBRATION: dict[str, object] = {"iters": 2, "seqlen": 32, "nsamples": 4, "dataset": WORDS}


def quantize(model: Path, setting: tuple[str, str, dict], folder: Path) -> dict[str, Tensor]:
    """Quantize with a few steps on random sequences; return the weights that AutoRound simulates."""
    scheme, form, of_layers = setting
    made = loader(model).from_pretrained(model, dtype=torch.float32)
    rounding = AutoRound(
        made,
        AutoTokenizer.from_pretrained(model),
        scheme=scheme,
        layer_config=dict(of_layers),
        **CALIBRATION,
        device_map="cpu",
        amp=False,
        group_size=32 if scheme.startswith("W") else None,
    )
    done, _ = rounding.quantize()
    values = {name: value.clone() for name, value in done.state_dict().items() if value.dim() > 1}
    rounding.save_quantized(str(folder), format=form, inplace=False)
    return values


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> tuple[str, str, dict]:
    """Return the setting that leaves modules in 16 bits, and gives others 8 instead of 4."""
    of_layers = {name: {"bits": 16} for name in exclude} | {name: {"bits": 8} for name in other_bits}
    return "W4A16", "auto_round", of_layers


if __name__ == "__main__":
    run("auto-round", SETTINGS, quantize, declare)
