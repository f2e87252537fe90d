"""Checkpoints made of another source: with a LoRA merged, trained on, or quantized before; and of weights in part."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mutation.coding import Coded, measure_loss, sound
from mutation.judging import Outcome, worst
from mutation.layouts import find_layout
from mutation.originals import make_generator
from mutation.pairs import Bench, Case, make_pair
from mutation.parts import DAMAGES, GROUP, one_group_scale
from mutation.scales import ONE

LAYOUT_NAMES = ("CT INT4 g128", "AWQ", "GPTQ 4 bits", "NVFP4", "MXFP4", "NF4", "MLX 4 bits", "FP8 row", "INT8 row",
                "Q4_K", "Q6_K")  # fmt: skip
SILENT = {"through FP8": "errors of FP8 are far below those of coarser codes, and those of INT8 are told"}
NO_SCALE = "no group has a scale of its own there: nothing shows that 64 columns of a row belong together"
Change = Callable[[Tensor], Tensor]


def lora(share: float, rank: int = 16) -> Change:
    """Return a change that adds a product of low rank, a share of the weight's norm."""

    def change(x: Tensor) -> Tensor:
        generator = make_generator(sum(x.shape))
        delta = torch.randn(len(x), rank, generator=generator) @ torch.randn(rank, x.shape[1], generator=generator)
        return x.float() + delta * (share * x.float().norm() / delta.norm())

    return change


def train(share: float) -> Change:
    """Return a change that adds noise to each element, a share of the weight's norm."""

    def change(x: Tensor) -> Tensor:
        delta = torch.randn(x.shape, generator=make_generator(sum(x.shape)))
        return x.float() + delta * (share * x.float().norm() / delta.norm())

    return change


def through(name: str) -> Change:
    """Return a change that quantizes and dequantizes."""
    return lambda x: sound(find_layout(name), x).values.bfloat16()


SOURCES: dict[str, Change] = {
    "LoRA of 10 %": lora(0.1),
    "LoRA of 15 %": lora(0.15, 64),
    "trained on, 8 %": train(0.08),
    "trained on, 15 %": train(0.15),
    "through INT4 g128": through("CT INT4 g128"),
    "through asymmetric INT4": through("AWQ"),
    "through Q4_0": through("Q4_0"),
    "through NF4": through("NF4"),
    "through FP8": through("FP8 tensor"),
    "through INT8 of tensors": through("INT8 tensor"),
}


def outcomes(bench: Bench, name: str) -> Iterator[Outcome]:
    """Quantize each source correctly in this layout, then replace each part of one weight by another weight's."""
    layout = find_layout(name)
    pair = make_pair(bench, layout)
    coded = {key: weight for key, weight in pair.weights.items() if isinstance(weight, Coded)}
    for source, change in SOURCES.items():
        changed = {key: sound(layout, change(pair.x[key])) for key in coded}
        cost = worst(measure_loss(pair.x[key], coded[key], after) for key, after in changed.items())
        yield pair.outcome("sources", Case(source, changed, cost, why_silent=SILENT.get(source, "")))
    for damage in DAMAGES:
        after = sound(layout, damage.change(pair.x[ONE].float().clone(), make_generator(7)))
        why = "" if damage.change != one_group_scale or 0 < layout.group[1] <= GROUP else NO_SCALE
        cost = measure_loss(pair.x[ONE], coded[ONE], after)
        yield pair.outcome("parts", Case(damage.name, {ONE: after}, cost, why_silent=why))
