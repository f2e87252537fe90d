"""What compressed-tensors makes of inputs: run where it is installed (pip install compressed-tensors==0.20.0).

python tests/golden_inputs/make.py        writes tests/golden_inputs/compressed_tensors.safetensors
"""

from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file

torch.manual_seed(0)
x = torch.distributions.Laplace(0, 1).sample((1, 8, 256))  # a chunk of tokens
x[..., 7] *= 40
x[:, 3] *= 100
x[:, 5, :32] = 0
found = {"x": x}
module = torch.nn.Linear(256, 1)
factor = torch.tensor([448 * 6 / 300.0])
static = torch.tensor([0.05])
zero = torch.tensor([3], dtype=torch.int8)

for name, args in {
    "fp8_token": QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True),
    "mxfp4": QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, dynamic=True, scale_dtype=torch.uint8
    ),
    "mxfp8": QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, dynamic=True, scale_dtype=torch.uint8
    ),
}.items():
    scale, point = compute_dynamic_scales_and_zp(x, args, module)
    found[name] = fake_quantize(x, scale, point, args)
args = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local", scale_dtype=torch.float8_e4m3fn
)
scale, point = compute_dynamic_scales_and_zp(x, args, module, global_scale=factor)
found["nvfp4"] = fake_quantize(x, scale, point, args, global_scale=factor)
args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
found["fp8_static"] = fake_quantize(x, static, torch.zeros(1), args)
args = QuantizationArgs(num_bits=8, type="int", strategy="tensor", dynamic=False, symmetric=False)
found["int8_static"] = fake_quantize(x, static, zero, args)
path = Path(__file__).parent / "compressed_tensors.safetensors"
save_file({name: value.contiguous() for name, value in found.items()}, path)
