"""FP8 of transformers: blocks of weights, one scale each, as DeepSeek writes them."""

from pathlib import Path

import torch
from common import loader, run
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

SETTINGS = {f"fp8 blocks of {size}": {"weight_block_size": (size, size)} for size in (128, 32)}


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize without the GPU that only running the model needs; return the values that transformers dequantizes."""
    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **kwargs: None
    config = FineGrainedFP8Config(**setting)
    made = loader(model).from_pretrained(model, dtype=torch.float32, quantization_config=config)
    made.save_pretrained(folder)
    names = {f"{name}.weight" for name, module in made.named_modules() if isinstance(module, FP8Linear)}
    config = FineGrainedFP8Config(**setting, dequantize=True)
    read = loader(model).from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    return {name: value for name, value in read.state_dict().items() if name in names}


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting that leaves modules out; all others have the same bits."""
    return SETTINGS["fp8 blocks of 32"] | {"modules_to_not_convert": [*exclude]}


if __name__ == "__main__":
    run("transformers", SETTINGS, quantize, declare)
