"""A block of a model whose norm may absorb factors of the weights after it."""

import torch
from support.making import numbers

BLOCK = "model.layers.0."

FED = [f"{BLOCK}self_attn.{letter}_proj.weight" for letter in "qkv"]


def int4(weight):
    """Return the weight rounded to 4-bit codes in groups of 32."""
    groups = weight.float().view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round().clamp(-8, 7) * scale).view(weight.shape).to(torch.bfloat16)


def model(norm=None):
    weights = {name: numbers(64, 128, seed=n) for n, name in enumerate(FED)}
    weights[f"{BLOCK}input_layernorm.weight"] = torch.ones(128) + 0.1 * torch.randn(128) if norm is None else norm
    weights[f"{BLOCK}mlp.up_proj.weight"] = numbers(96, 128, seed=7)
    weights[f"{BLOCK}mlp.down_proj.weight"] = numbers(64, 96, seed=8)
    return weights


def factors(n, seed=1):
    return torch.empty(n).log_normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
