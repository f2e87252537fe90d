"""Damage to unquantized tensors: false casts, incomplete folds, foreign biases."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from support import casting
from torch import Tensor

from mutation.coding import Coded, Layout, sound
from mutation.judging import Outcome, of_sound
from mutation.layouts import find_layout
from mutation.originals import EMBEDDING, HEAD, HIDDEN, INNER, KEYS, NORM, Tensors, heavy, linear, make_generator, model
from mutation.pairs import Bench, Case, as_matrix, make_pair

# Layout, the dtype of what it leaves, and whether it leaves all.
CASTS = {
    "casts FP8 F32": ("FP8 row", torch.float32, False),
    "casts GPTQ F16": ("GPTQ 4 bits", torch.float16, False),
    "casts MLX BF16": ("MLX 4 bits", torch.bfloat16, False),
    "casts Q4_K F32": ("Q4_K", torch.float32, False),
    "casts whole F16": ("INT8 row", torch.float16, True),
}
FOLDED = ("AWQ", "CT INT4 g128", "FP8 row")
BIASED = ("GPTQ 4 bits", "INT8 row", "CT NVFP4", "AWQ", "CT INT4 g128")
LAYER = "model.layers.0."
INPUT_NORM = f"{LAYER}input_layernorm.weight"
Q, K, V, OUT = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo")
UP, DOWN = f"{LAYER}mlp.up_proj.weight", f"{LAYER}mlp.down_proj.weight"
V_BIAS = V.replace("weight", "bias")
CORRECTED = ("FP8 row", "INT8 row", "NVFP4", "AWQ", "CT INT4 g128")  # formats of quantizers that correct biases
TARGETS = (EMBEDDING, HEAD, NORM, INPUT_NORM, V_BIAS)


def without_mlp() -> Tensors:
    """Return the model without its largest matrices."""
    return {name: weight for name, weight in model().items() if ".mlp." not in name}


def leave(_layout: Layout, x: Tensor) -> Tensor:
    """Leave the tensor unquantized."""
    return x


def casts(bench: Bench, name: str) -> Iterator[Outcome]:
    """Damage each kind of tensor in each way while it is cast to another dtype."""
    layout, dtype, whole = CASTS[name]
    stored = replace(find_layout(layout), config={}) if whole else find_layout(layout)
    pair = make_pair(bench, stored, without_mlp(), leave if whole else sound, dtype)
    yield of_sound("casts", name, pair.report)
    for target in (*TARGETS, *((V,) if whole else ())):
        for damage, change in casting.DAMAGES.items():
            x = pair.x[target]
            broken = change(x if x.dim() > 1 else x.view(32, -1)).view(x.shape).to(dtype)
            if not torch.equal(broken, x.to(dtype)):
                yield pair.outcome("casts", Case(f"{name}, {target}, {damage}", {target: broken}))


def folds(bench: Bench) -> Iterator[Outcome]:
    """Move factors from one weight to the next, and forget one side or a bias."""
    for layout in map(find_layout, FOLDED):
        pair = make_pair(bench, layout, excuse="the suite's folds")
        for case in fold_cases(layout, pair.x):
            yield pair.outcome("folds", case)


def fold_cases(layout: Layout, x: Tensors) -> Iterator[Case]:
    """Yield incomplete folds of the input norm, of v and o, and of up and down."""
    inputs, rows, inner = (
        (0.4 * torch.randn(size, generator=make_generator(size))).exp() for size in (HIDDEN, KEYS, INNER)
    )
    heads = rows.view(2, 1, 64).expand(2, HIDDEN // KEYS, 64).reshape(-1)  # by query head
    qkv = {name: x[name].float() * inputs for name in (Q, K, V)}
    norm = {INPUT_NORM: (x[INPUT_NORM].float() / inputs).bfloat16()}
    v, o = {V: x[V].float() / rows[:, None]}, {OUT: x[OUT].float() * heads}
    off = (norm[INPUT_NORM].float() * (1 + 0.1 * torch.randn(HIDDEN, generator=make_generator(7)))).bfloat16()
    tiled = {OUT: x[OUT].float() * rows.repeat(HIDDEN // KEYS)}
    unit_factors = torch.ones(INNER)
    unit_factors[INNER // 7] = 1.5
    bias = {V_BIAS: (x[V_BIAS].float() / rows).bfloat16()}
    up, down = {UP: x[UP].float() / inner[:, None]}, {DOWN: x[DOWN].float() * inner}
    for name, tensors, right in (
        ("norm folded", qkv | norm, True),
        ("norm folded, norm off by 10 %", qkv | {INPUT_NORM: off}, False),
        ("norm folded, norm forgotten", qkv, False),
        ("norm folded, q forgotten", {**qkv, **norm, Q: x[Q]}, False),
        ("v and o folded", v | o | bias, True),
        ("v and o folded, heads tiled", v | tiled | bias, False),
        ("v and o folded, bias forgotten", v | o, False),
        ("v and o folded, o forgotten", v | bias, False),
        ("up and down folded", up | down, True),
        ("up and down folded, down forgotten", up, False),
        ("up and down folded, one row × 1.5", up | down | {UP: up[UP] * unit_factors[:, None]}, False),
        ("up and down folded, one column × 1.5", up | down | {DOWN: down[DOWN] * unit_factors}, False),
    ):
        coded = {key: sound(layout, as_matrix(value)) if linear(key) else value for key, value in tensors.items()}
        yield Case(name, coded, sound=right, names=(Q, K, V, OUT, UP, DOWN, INPUT_NORM, V_BIAS))


def biases(bench: Bench) -> Iterator[Outcome]:
    """Change biases in formats without corrections."""
    for layout in map(find_layout, BIASED):
        pair = make_pair(bench, layout, without_mlp())
        for name in (V_BIAS, V_BIAS.replace("v_proj", "k_proj")):
            bias = pair.x[name]
            noise = heavy(tuple(bias.shape), make_generator(4))
            for label, broken in {
                "noise of 0.2": bias + 0.2 * noise,
                "noise of 5 %": bias * (1 + 0.05 * noise),
                "× 1.04": 1.04 * bias,
                "zero": 0 * bias,
                "of the next layer": pair.x[name.replace("layers.0", "layers.1")],
                "rolled": bias.roll(1),
            }.items():
                yield pair.outcome("biases", Case(f"{name}, {label}", {name: broken.bfloat16()}))


def corrections(bench: Bench) -> Iterator[Outcome]:
    """Correct biases for the error of their weight, or change them as no correction does.

    They are so small that the weight's error affects outputs more than their loss.
    """
    model_of_small = without_mlp()
    model_of_small[V_BIAS] = (0.002 * model_of_small[V_BIAS].float()).bfloat16()
    for layout in map(find_layout, CORRECTED):
        pair = make_pair(bench, layout, model_of_small, excuse="corrected biases")
        bias, weight = pair.x[V_BIAS], pair.weights[V]
        assert isinstance(weight, Coded)
        error = (weight.values - pair.x[V].double()).float()
        for mean in (0.1, 0.5):  # mean input, relative to the inputs' norm
            inputs = mean * torch.randn(error.shape[1], generator=make_generator(6))
            corrected = (bias.float() - error @ inputs).to(bias.dtype)
            yield pair.outcome("corrections", Case(f"corrected, mean {mean}", {V_BIAS: corrected}, sound=True))
        ones, half = torch.zeros(len(bias)), torch.ones(len(bias))
        ones[len(bias) // 3] = 1
        half[len(bias) // 2 :] = 0
        for label, factors in {"doubled": 2 + 0 * ones, "halved": 0.5 + 0 * ones, "cut": half, "one zeroed": 1 - ones,
                              "one doubled": 1 + ones, "inverted": -1 + 0 * ones}.items():  # fmt: skip
            broken = (bias.float() * factors).to(bias.dtype)
            yield pair.outcome("corrections", Case(f"{V_BIAS}, {label}", {V_BIAS: broken}))
