"""A model with mostly unquantized tensors, and damage that a cast to another dtype may do to them."""

from itertools import product

import torch
from support.making import FP8, numbers, quantized_fp8
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRS = list(product(("F32", "F16", "BF16"), repeat=2))

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, ROUTER = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.gate.weight"
CODED = "model.layers.0.mlp.down_proj.weight"
UNQUANTIZED = (EMBEDDING, HEAD, NORM, ROUTER)


def model(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return tensors of all magnitudes that a quantizer leaves alone, and a weight that it quantizes."""
    x = {name: numbers(64, 128, seed=n, dtype=torch.float32) for n, name in enumerate((EMBEDDING, HEAD, ROUTER))}
    x[EMBEDDING] *= torch.logspace(-8, 0, 64)[:, None]
    x[NORM] = 1 + 0.3 * torch.randn(128, generator=torch.Generator().manual_seed(5))
    x[CODED] = numbers(64, 128, seed=9)
    return {name: weight.to(dtype) for name, weight in x.items()}


def with_codes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantize one weight to FP8."""
    codes, scale = quantized_fp8(weights[CODED])
    return weights | {CODED: codes, f"{CODED}_scale": scale}


def int4(x: Tensor) -> Tensor:
    """Return the values after rounding to 4-bit codes with a scale for each row."""
    scale = x.float().abs().amax(1, keepdim=True) / 7
    return ((x.float() / scale).round() * scale).to(x.dtype)


def swap_rows(x: Tensor) -> Tensor:
    """Exchange two rows: tokens or experts."""
    y = x.clone()
    y[[3, 17]] = x[[17, 3]]
    return y


def clip(x: Tensor) -> Tensor:
    """Clip at 1.2 times the root mean square."""
    limit = 1.2 * float(x.float().square().mean().sqrt())
    return x.clamp(-limit, limit)


def noisy(x: Tensor, relative: float = 0.02) -> Tensor:
    """Change each element a little, as a few training steps do."""
    generator = torch.Generator().manual_seed(1)
    return (x.float() * (1 + relative * torch.randn(x.shape, generator=generator))).to(x.dtype)


DAMAGES = {
    "two rows swapped": swap_rows,
    "through INT4": int4,
    "noise": noisy,
    "× 1.04": lambda x: (1.04 * x.float()).to(x.dtype),
    "clipped": clip,
    "through E4M3": lambda x: x.float().to(FP8).to(x.dtype),
    "one element": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == x.numel() - 58, 1.02 * x, x),
}


def apply_damage(x: Tensor, name: str) -> Tensor:
    """Return a tensor after that damage, a norm as a matrix of 32 rows."""
    return DAMAGES[name](x.view(x.shape if x.dim() > 1 else (32, 4))).view(x.shape)
