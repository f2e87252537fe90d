"""Originals with the statistics of real models: heavy tails, outlier columns, rows of all sizes, norms far from 1."""

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 512, 768, 128, 512, 2
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
EXPERTS, EXPERT_ROWS = 8, 128
STACK = "model.layers.0.mlp.experts.down_proj"


def make_generator(seed: int) -> torch.Generator:
    """Return a generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def heavy(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return numbers of variance 1 with the tails of Student's t with 5 degrees of freedom."""
    chi = sum(torch.randn(shape, generator=generator).square() for _ in range(5)) / 5
    return torch.randn(shape, generator=generator) / torch.as_tensor(chi).sqrt() * 0.6**0.5


def matrix(rows: int, cols: int, seed: int) -> Tensor:
    """Return a BF16 weight with rows and columns of many sizes, three outlier columns and a row of small numbers."""
    generator = make_generator(seed)
    x = heavy((rows, cols), generator) * 0.02
    x *= (0.4 * torch.randn(rows, 1, generator=generator)).exp()
    x *= (0.25 * torch.randn(cols, generator=generator)).exp()
    x[:, torch.randint(cols, (3,), generator=generator)] *= 6
    x[rows // 3] *= 0.05
    return x.bfloat16()


def norm(size: int, seed: int) -> Tensor:
    """Return the weight of a norm, BF16: around 0.4, with a few far larger values."""
    generator = make_generator(seed)
    x = 0.4 * (0.3 * torch.randn(size, generator=generator)).exp()
    x[torch.randint(size, (4,), generator=generator)] *= 12
    return x.bfloat16()


def model() -> Tensors:
    """Return a small model like Qwen2: q, k and v have biases, and those of k have outliers."""
    tensors = {EMBEDDING: matrix(VOCABULARY, HIDDEN, 1), HEAD: matrix(VOCABULARY, HIDDEN, 2), NORM: norm(HIDDEN, 3)}
    for layer in range(LAYERS):
        prefix, seed = f"model.layers.{layer}.", 100 * (layer + 1)
        for n, (name, shape) in enumerate(SHAPES.items()):
            tensors[f"{prefix}{name}.weight"] = matrix(*shape, seed + n)
        for n, name in enumerate(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
            generator = make_generator(seed + 20 + n)
            bias = heavy((SHAPES[name][0],), generator)
            bias[torch.randint(len(bias), (3,), generator=generator)] *= 30
            tensors[f"{prefix}{name}.bias"] = bias.bfloat16()
        for n, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            tensors[f"{prefix}{name}.weight"] = norm(HIDDEN, seed + 30 + n)
    return tensors


def make_stacks() -> Tensors:
    """Return experts of different sizes in one tensor, (experts, rows, cols), and a router."""
    sizes = (0.5 * torch.randn(EXPERTS, generator=make_generator(6))).exp()
    experts = torch.stack([matrix(EXPERT_ROWS, HIDDEN, 300 + n) * sizes[n] for n in range(EXPERTS)])
    return {STACK: experts.bfloat16(), "model.layers.0.mlp.router.weight": matrix(EXPERTS, HIDDEN, 400)}


def linear(name: str) -> bool:
    """Return True if quantizers quantize this tensor."""
    return name.endswith("_proj.weight") or name == STACK
