"""bitsandbytes, by transformers: NF4 and FP4, with double quantization and without, and LLM.int8()."""

from pathlib import Path

import torch
from bitsandbytes import functional
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from common import loader, run
from torch import Tensor
from transformers import BitsAndBytesConfig

FOUR = {"load_in_4bit": True}
SETTINGS = {
    "nf4": FOUR | {"bnb_4bit_quant_type": "nf4"},
    "nf4 double": FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": FOUR | {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def four_bits(parameter: Tensor) -> Tensor:
    """Dequantize with plain operations: for short rows, the kernel for CPUs takes the scale of another block."""
    state = parameter.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2).float() + state.offset
    flat = parameter.data.view(torch.uint8).view(-1)
    return _dequantize_4bit_compute(flat, absmax, state.code, state.blocksize, state.shape, torch.float32)


def quantize(model: Path, setting: dict, folder: Path) -> dict[str, Tensor]:
    """Quantize in float32 where possible; return the values that bitsandbytes reads."""
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **setting)
    made = loader(model).from_pretrained(model, dtype=torch.float32, quantization_config=config)
    made.save_pretrained(folder)
    values = {}
    for name, parameter in made.named_parameters():
        if getattr(parameter, "quant_state", None) is not None:
            values[name] = four_bits(parameter)
        elif getattr(parameter, "SCB", None) is not None:
            values[name] = functional.int8_vectorwise_dequant(parameter.data, parameter.SCB)
    return values


def declare(exclude: tuple[str, ...], other_bits: tuple[str, ...]) -> dict:
    """Return the setting that leaves modules out; all others have the same bits."""
    return SETTINGS["nf4"] | {"llm_int8_skip_modules": [*exclude]}


if __name__ == "__main__":
    run("bitsandbytes", SETTINGS, quantize, declare)
