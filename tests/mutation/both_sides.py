"""Damage that the original already has, so that both sides agree: zeros, constants, misplaced experts."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from mutation import files
from mutation.judging import STRUCTURAL, Outcome, judge_broken
from mutation.layouts import STACKS, find_layout
from mutation.originals import EMBEDDING, EXPERTS, STACK, Tensors, make_stacks, model
from mutation.pairs import Bench, Case, Sound, make_pair, quantize, sound_outcome

LAYOUT_NAMES = ("FP8 row", "FP8 tensor", "INT8 row", "CT INT4 g128", "AWQ", "CT NVFP4", "NF4", "MLX 4 bits", "Q4_0",
                "Q8_0", "Q6_K")  # fmt: skip
EXPERT_LAYOUT_NAMES = (*(layout.name for layout in STACKS), "FP8 row", "CT INT4 g128")
MLP = tuple(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
INPUT_NORM, BIAS = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"
ROUTER = "model.layers.{}.mlp.router.weight"
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"
Change = Callable[[Tensors], Mapping[str, Tensor]]


def clear_rows(x: Tensors) -> Tensors:
    """Clear rows of the embedding that no token uses."""
    embedding = x[EMBEDDING].clone()
    embedding[:3] = 0
    return {EMBEDDING: embedding}


BROKEN: dict[str, Change] = {
    "MLP zero": lambda x: {name: torch.zeros_like(x[name]) for name in MLP},
    "one matrix zero": lambda x: {MLP[2]: torch.zeros_like(x[MLP[2]])},
    "one matrix of one value": lambda x: {MLP[1]: torch.full_like(x[MLP[1]], 0.03)},
}
SOUND: dict[str, Change] = {
    "norm of ones": lambda x: {INPUT_NORM: torch.ones_like(x[INPUT_NORM])},
    "bias of zeros": lambda x: {BIAS: torch.zeros_like(x[BIAS])},
    "padding rows": clear_rows,
}
BROKEN_EXPERTS: dict[str, Callable[[Tensor], Tensor]] = {
    "experts of the last rank": lambda x: x[[4, 5, 6, 7, 4, 5, 6, 7]],
    "one expert twice": lambda x: x[[0, 1, 2, 3, 4, 5, 6, 2]],
    "one expert zero": lambda x: torch.cat((x[:-1], 0 * x[-1:])),
}
MOVED = [3, 0, 2, 1, 7, 6, 5, 4]  # the experts' new order
SOUND_EXPERTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one expert of the other sign": lambda x: torch.cat((x[:-1], -x[:1])),
    "one expert in another order": lambda x: torch.cat((x[:-1], x[:1].flip(1))),
}


def outcomes(bench: Bench, name: str) -> Iterator[Outcome]:
    """Change the original in each way and quantize it soundly in this layout."""
    layout, x = find_layout(name), model()
    pair = make_pair(bench, layout)
    for label, change in BROKEN.items():
        changed = change(x)
        yield _break(pair, label, {**x, **changed}, changed)
    for label, change in SOUND.items():
        yield sound_outcome("both sides", label, make_pair(bench, layout, {**x, **change(x)}))


def experts(bench: Bench, name: str) -> Iterator[Outcome]:
    """Change experts in each way: in a stack, or apart in layouts that have no stacks."""
    layout, x = find_layout(name), make_stacks()
    apart = layout not in STACKS
    pair = make_pair(bench, layout, _apart(x) if apart else x)
    for label, change in (*BROKEN_EXPERTS.items(), *SOUND_EXPERTS.items()):
        changed = {**x, STACK: change(x[STACK])}
        tensors = _apart(changed) if apart else changed
        if label in BROKEN_EXPERTS:
            yield _break(pair, label, tensors, [key for key in tensors if ".experts." in key])
        else:
            yield sound_outcome("both sides", label, make_pair(bench, layout, tensors))
    yield from _move(pair, x, apart)


def _move(pair: Sound, x: Tensors, apart: bool) -> Iterator[Outcome]:
    """Store experts in another order, with and without the rows of their router."""
    router = ROUTER.format(int(apart))
    for label, order, is_sound in (("with their router", MOVED, True), ("alone", None, False)):
        moved = {STACK: x[STACK][MOVED]}
        stored = quantize(pair.layout, _apart(moved) if apart else moved)
        routers = {router: pair.x[router] if order is None else pair.x[router][order]}
        names = tuple(name for name in pair.x if ".experts." in name)
        yield pair.outcome(
            "both sides", Case(f"experts moved {label}", {**stored, **routers}, names=names, sound=is_sound)
        )


def _apart(x: Tensors) -> Tensors:
    """Return the experts as separate weights, in the second of two blocks."""
    others = {name.replace("layers.0", "layers.1"): weight for name, weight in x.items() if name != STACK}
    return others | {EXPERT.format(n): x[STACK][n] for n in range(EXPERTS)}


def _break(pair: Sound, label: str, x: Tensors, names: Mapping[str, Tensor] | list[str]) -> Outcome:
    """Return what is reported of a broken original and its sound copy; ``pair`` has the sound original."""
    both = make_pair(pair.bench, pair.layout, x)
    outcome = judge_broken("both sides", f"{pair.layout.name}, {label}", both.report, pair.report, names, STRUCTURAL)
    pair.bench.done(outcome, both.original, both.path)
    files.remove([both.original, both.path])
    return outcome
