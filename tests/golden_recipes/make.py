"""Writes what the libraries that recipes follow make of a few weights, for tests/recipes/test_recipes.py.

    pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2 torchao==0.18.0 gguf==0.19.0 ml_dtypes==0.6.0 \
        'mlx[cpu]==0.32.4'
    python tests/golden_recipes/make.py weights                          the weights
    python tests/golden_recipes/make.py values IN.safetensors OUT.json   a SHA-256 of the values of each recipe

Values are float32; zeros have lost their sign. NaN, as torchao makes of rows of zeros, is left out.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np
import torch
from bitsandbytes import functional as bnb
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.quantization.utils.helpers import generate_gparam
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8WeightOnlyConfig, quantize_

HERE = Path(__file__).parent
E4M3, U8 = torch.float8_e4m3fn, torch.uint8


def weights() -> dict[str, torch.Tensor]:
    """Return Gaussian, heavy-tailed, zero, constant and tiny weights, some with zero rows and groups, (16, 256)."""
    generator = torch.Generator().manual_seed(1)

    def normal() -> torch.Tensor:
        return torch.randn(16, 256, generator=generator)

    holes = normal()
    holes[3], holes[:, 32:64] = 0, 0
    return {
        "gaussian": normal(),
        "heavy": normal() / normal().abs().clamp(min=0.05),
        "zero": torch.zeros(16, 256),
        "constant": torch.full((16, 256), 0.37),
        "tiny": normal() * 1e-30,
        "positive": normal().abs() + 1,
        "holes": holes,
    }


def of_compressed_tensors(x: torch.Tensor, group: int, **fields: object) -> torch.Tensor:
    """Return the values of groups of columns."""
    args = QuantizationArgs(**fields)
    blocks = x.view(len(x), -1, group)
    global_scale = generate_gparam(x.amin(), x.amax()) if group == 16 else None
    scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), args, global_scale)
    return fake_quantize(x, scale, zero, args, global_scale=global_scale)


def values(x: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield library, recipe and values."""
    cols = x.shape[1]
    for bits in range(2, 9):
        for symmetric, option in ((True, ""), (False, ":asym")):
            for group, name in ((32, "g32"), (128, "g128"), (cols, "channel")):
                how = {"strategy": "channel"} if group == cols else {"strategy": "group", "group_size": group}
                rounded = of_compressed_tensors(x, group, num_bits=bits, type="int", symmetric=symmetric, **how)
                yield "compressed-tensors", f"int{bits}_{name}{option}", rounded
    floats = {"type": "float", "symmetric": True}
    yield "compressed-tensors", "fp8_row", of_compressed_tensors(x, cols, num_bits=8, strategy="channel", **floats)
    tensor = QuantizationArgs(num_bits=8, strategy="tensor", **floats)
    yield "compressed-tensors", "fp8_tensor", fake_quantize(x, *calculate_qparams(x.amin(), x.amax(), tensor), tensor)
    micro = {"strategy": "group", "group_size": 32, "scale_dtype": U8, "zp_dtype": U8, **floats}
    yield "compressed-tensors", "mxfp4", of_compressed_tensors(x, 32, num_bits=4, **micro)
    yield "compressed-tensors", "mxfp8", of_compressed_tensors(x, 32, num_bits=8, **micro)
    nv = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3, "zp_dtype": E4M3, **floats}
    yield "compressed-tensors", "nvfp4", of_compressed_tensors(x, 16, num_bits=4, **nv)
    for quant_type in ("nf4", "fp4"):
        for block, name in ((64, quant_type), (128, f"{quant_type}_g128")):
            yield (
                "bitsandbytes",
                name,
                bnb.dequantize_4bit(*bnb.quantize_4bit(x, blocksize=block, quant_type=quant_type)),
            )
    for dtype in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        quant_type = gguf.GGMLQuantizationType[dtype]
        stored = gguf.quants.quantize(x.numpy(), quant_type)
        yield "gguf", f"gguf_{dtype.lower()}", torch.from_numpy(gguf.quants.dequantize(stored, quant_type).copy())
    linear = torch.nn.Sequential(torch.nn.Linear(cols, len(x), bias=False))
    linear[0].weight.data.copy_(x)
    quantize_(linear, Float8WeightOnlyConfig())
    yield "torchao", "fp8_row", linear[0].weight.dequantize().detach()
    scale = np.abs(x.numpy()).max() / np.float32(448) or np.float32(1)
    codes = np.clip(x.numpy() / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            rounded = mx.dequantize(*mx.quantize(mx.array(x.numpy()), group, bits), group, bits)
            yield "mlx", f"mlx_q{bits}_g{group}", torch.from_numpy(np.array(rounded))
    yield "ml_dtypes", "fp8_tensor", torch.from_numpy(codes.astype(np.float32) * scale)


def digest(values: torch.Tensor) -> str:
    """Return a checksum of values without the sign of zeros."""
    return hashlib.sha256((values.float().contiguous() + 0.0).numpy().tobytes()).hexdigest()


def main() -> None:
    """Write what the command line asks for."""
    if sys.argv[1:] == ["weights"]:
        save_file(weights(), HERE / "weights.safetensors")
        return
    _, _, source, target = sys.argv
    made: dict[str, dict[str, str]] = {}
    for name, x in load_file(source).items():
        if x.dim() == 2 and x.shape[1] % 128 == 0 and "embedding" not in name:
            for library, recipe, value in values(x.float()):
                if not value.isnan().any():
                    made.setdefault(f"{recipe} {library}", {})[name] = digest(value)
    Path(target).write_text(json.dumps(made, indent=0) + "\n")


if __name__ == "__main__":
    main()
