"""Makes torchao.bin: a state dict with tensors of torchao, as torch.save stores them, and what they stand for.

    python tests/golden_pickles/make_golden_pickles.py        needs torchao (made with 0.18.0)

torchao.safetensors holds the original; torchao.expected.safetensors the values that dequantize() returns, in float32.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

HERE = Path(__file__).parent


def make() -> None:
    """Write the three files."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"int8": nn.Linear(64, 16, bias=False), "fp8": nn.Linear(64, 16, bias=False)})
    save_file(model.state_dict(), HERE / "torchao.safetensors")
    quantize_(model, Int8WeightOnlyConfig(), lambda _, name: name == "int8")
    quantize_(model, Float8WeightOnlyConfig(), lambda _, name: name == "fp8")
    torch.save(model.state_dict(), HERE / "torchao.bin")
    save_file({name: w.dequantize() for name, w in model.state_dict().items()}, HERE / "torchao.expected.safetensors")


if __name__ == "__main__":
    make()
