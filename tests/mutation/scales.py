"""Scales too wide, too narrow, zero or noisy, of all weights or of parts; and sound quantizers of the same layouts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mutation.coding import Coded, Layout, code, compensate, measure_loss, search, sound, stochastic
from mutation.judging import Outcome, worst
from mutation.layouts import scheme
from mutation.originals import STACK, make_generator
from mutation.pairs import Bench, Case, Sound, as_matrix, make_pair, originals_of, sound_outcome

Places = Callable[[Layout, Tensor, tuple[int, int]], Tensor | None]  # of groups: where scales are bad
ONE = "model.layers.1.mlp.down_proj.weight"  # the damaged weight, unless all are
EXPERT = 3
FOUR, COARSE = 4, "codes of four levels err by half of a value, beside which such a factor is small"
OF_LLM_COMPRESSOR = "CT INT4 g128"  # the layout to try llm-compressor's GPTQ with
MAX_GPTQ_COLUMNS = 1024  # columns that GPTQ takes: of more it takes too long


class Damage(NamedTuple):
    """One kind of damage to scales."""

    name: str
    places: Places
    factor: float  # multiplies scales
    codes_kept: bool = False  # keep the codes of the sound file; otherwise take the nearest
    everywhere: bool = False  # damage all weights of the model
    shared: float = 1.0  # multiplies the scale that other scales share and are rounded under
    noise: float = 0.0  # standard deviation of the noise on logarithms of scales


def _all(_layout: Layout, scale: Tensor, _shape: tuple[int, int]) -> Tensor:
    return torch.ones_like(scale, dtype=torch.bool)


def _rows(layout: Layout, scale: Tensor, shape: tuple[int, int], first: int = 0, n: int = 1) -> Tensor | None:
    """Select rows from a fifth of the weight on, or from row ``first`` on. Return None if all rows share a scale."""
    rows_per_scale = layout.group[0] or shape[0]
    if len(scale) == 1:
        return None
    row = first or shape[0] // 5
    selected = torch.zeros_like(scale, dtype=torch.bool)
    selected[row // rows_per_scale : (row + n - 1) // rows_per_scale + 1] = True
    return selected


def _columns(layout: Layout, scale: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Select a group of columns in all rows, at least 64 columns."""
    if scale.shape[1] == 1:
        return None
    columns_per_scale = layout.group[1]
    at = scale.shape[1] // 3
    selected = torch.zeros_like(scale, dtype=torch.bool)
    selected[:, at : at + max(64 // columns_per_scale, 1)] = True
    return selected


def _tile(layout: Layout, scale: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Select 64 × 64 elements, or a larger group."""
    rows, columns = _rows(layout, scale, shape, shape[0] // 2, 64), _columns(layout, scale, shape)
    return None if rows is None or columns is None else rows & columns


def _expert(layout: Layout, scale: Tensor, shape: tuple[int, int]) -> Tensor | None:
    return _rows(layout, scale, shape, EXPERT * 128, 128) if layout.family == "experts" else None


FOUR_ROWS = partial(_rows, n=4)
DAMAGES = (
    Damage("all × 64", _all, 64, everywhere=True),
    Damage("all × 6", _all, 6, everywhere=True),
    Damage("all / 6", _all, 1 / 6, everywhere=True),
    Damage("all × 1.3, codes kept", _all, 1.3, True, True),
    Damage("all noisy", _all, 1, everywhere=True, noise=0.9),
    Damage("tensor × 64", _all, 64),
    Damage("tensor × 6", _all, 6),
    Damage("tensor / 6", _all, 1 / 6),
    Damage("tensor × 1.3, codes kept", _all, 1.3, True),
    Damage("tensor / 1.3, codes kept", _all, 1 / 1.3, True),
    Damage("tensor noisy", _all, 1, noise=0.9),
    Damage("superblocks × 64", _all, 1, shared=64),
    Damage("superblocks / 4", _all, 1, shared=1 / 4),
    Damage("row × 8", _rows, 8),
    Damage("row / 8", _rows, 1 / 8),
    Damage("row × 1.3, codes kept", _rows, 1.3, True),
    Damage("4 rows × 8", FOUR_ROWS, 8),
    Damage("4 rows / 6", FOUR_ROWS, 1 / 6),
    Damage("4 rows × 1.15, codes kept", FOUR_ROWS, 1.15, True),
    Damage("4 rows zero", FOUR_ROWS, 0, True),
    Damage("columns × 8", _columns, 8),
    Damage("columns / 6", _columns, 1 / 6),
    Damage("columns × 1.3, codes kept", _columns, 1.3, True),
    Damage("columns zero", _columns, 0, True),
    Damage("tile × 8", _tile, 8),
    Damage("tile / 6", _tile, 1 / 6),
    Damage("tile × 1.5, codes kept", _tile, 1.5, True),
    Damage("tile zero", _tile, 0, True),
    Damage("expert × 64", _expert, 64),
    Damage("expert × 6", _expert, 6),
    Damage("expert / 6", _expert, 1 / 6),
    Damage("expert × 1.3, codes kept", _expert, 1.3, True),
)


def damage_scales(before: Coded, x: Tensor, damage: Damage) -> Coded | None:
    """Return the weight with bad scales; None where its layout has no such place."""
    layout, (scale, shift) = before.layout, before.wanted
    places = damage.places(layout, scale, before.shape)
    if places is None or (damage.shared != 1 and not layout.two_levels):
        return None
    factor = torch.where(places, damage.factor, 1.0)
    if damage.noise:
        factor = factor * (damage.noise * torch.randn(scale.shape, generator=make_generator(8))).exp()
    if damage.codes_kept and shift is not None:
        shift = shift * factor
    codes = before.codes if damage.codes_kept else None
    if damage.shared != 1:
        return code(layout, x, scale, shift, damage.shared)
    return code(layout, x, scale * factor, shift, codes=codes)


def outcomes(bench: Bench, layout: Layout, damages: tuple[Damage, ...] = DAMAGES) -> Iterator[Outcome]:
    """Damage the scales of a layout in every way."""
    pair = make_pair(bench, layout)
    for damage in damages:
        if damaged_case := case(pair, damage):
            yield pair.outcome(f"scales, {layout.family}", damaged_case)
    if layout.name == OF_LLM_COMPRESSOR:
        yield pair.outcome(f"scales, {layout.family}", quantize_undeclared(pair))


def quantize_undeclared(pair: Sound) -> Case:
    """Quantize with GPTQ and declare no method that lets errors compensate each other."""
    coded = {name: weight for name, weight in pair.weights.items() if isinstance(weight, Coded)}
    changed = {name: by_gptq(pair.layout, pair.x[name]) for name in coded}
    cost = worst(measure_loss(pair.x[name], coded[name], after) for name, after in changed.items())
    return Case("GPTQ, not declared", changed, cost)


def case(pair: Sound, damage: Damage) -> Case | None:
    """Return the case of a damage: the weights that it changes, and what they lose."""
    coded = {name: weight for name, weight in pair.weights.items() if isinstance(weight, Coded)}
    changed, losses = {}, []
    for name in coded if damage.everywhere else [STACK if STACK in coded else ONE]:
        x = as_matrix(pair.x[name])
        if after := damage_scales(coded[name], x, damage):
            changed[name] = after
            losses.append(measure_loss(x, coded[name], after))
    coarse = damage.codes_kept and pair.layout.grid.high - pair.layout.grid.low < FOUR and 1 < damage.factor <= 1.5
    return Case(damage.name, changed, worst(losses), why_silent=COARSE if coarse else "") if changed else None


# Sound quantizers


def clipped_a_little(layout: Layout, x: Tensor) -> Coded:
    """Quantize with scales of 0.92 of the range, as a search for activations chooses them."""
    plain = sound(layout, x)
    scale, shift = plain.wanted
    return code(layout, x, 0.92 * scale, None if shift is None else 0.92 * shift)


def by_ocp(layout: Layout, x: Tensor) -> Coded:
    """Quantize with powers of two by OCP's rule: floor(log2(largest value)) less the codes' largest exponent."""
    groups = layout.groups(x.float())
    largest = torch.tensor(layout.grid.high).log2().floor()
    exponent = groups.abs().amax((1, 3)).clamp(min=2.0**-100).log2().floor() - largest
    return code(layout, x, torch.exp2(exponent), None)


def by_gptq(layout: Layout, x: Tensor) -> Coded:
    """Quantize with GPTQ on correlated inputs, of which some columns are large."""
    generator = make_generator(9)
    cols = x.shape[1]
    if cols > MAX_GPTQ_COLUMNS:
        return sound(layout, x)
    inputs = torch.randn(2048, cols // 4, generator=generator) @ torch.randn(cols // 4, cols, generator=generator)
    inputs = inputs / (cols / 4) ** 0.5 + 0.3 * torch.randn(2048, cols, generator=generator)
    inputs = inputs * torch.exp(0.8 * torch.randn(cols, generator=generator))
    return compensate(layout, x, inputs, layout.name == OF_LLM_COMPRESSOR)


def declared_by_gptq(layout: Layout) -> Layout:
    """Return the layout as GPTQ's producers declare it: GPTQModel its method, llm-compressor the order of columns."""
    static = scheme(4, 128, True, actorder="static")
    return replace(layout, config=static) if layout.name == OF_LLM_COMPRESSOR else layout


class Quantizer(NamedTuple):
    """A quantizer that makes sound files."""

    name: str
    quantize: Callable[[Layout, Tensor], Coded]
    fits: Callable[[Layout], bool]
    original: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)  # changes its original first
    declared: Callable[[Layout], Layout] = staticmethod(lambda layout: layout)  # with its config


def _always(_layout: Layout) -> bool:
    return True


def _ternary(x: Tensor) -> Tensor:
    level = x.float().abs().mean(1, keepdim=True)
    return (x.float() / level).round().clamp(-1, 1).mul(level).bfloat16()


def _zero_groups(x: Tensor) -> Tensor:
    y = x.clone()
    y[: len(y) // 8, : x.shape[1] // 2 // 256 * 256] = 0
    y[len(y) // 2] = 0
    return y


def _tiny_rows(x: Tensor) -> Tensor:
    y = x.clone()
    y[5::50] *= 1e-3
    return y


def _heavy_rows(x: Tensor) -> Tensor:
    y = x.clone()
    y[7::200] *= 30
    return y


def _rows_of_all_sizes(x: Tensor) -> Tensor:
    y = x.float()
    y[3::10] *= 100
    y[4::10] /= 100
    return y.bfloat16()


def _huge_values(x: Tensor) -> Tensor:
    y = x.float()
    y.view(-1)[torch.randint(y.numel(), (20,), generator=make_generator(len(y)))] *= 1e4
    return y.bfloat16()


def scaled_before_rounding(layout: Layout, x: Tensor) -> Coded:
    """Take the codes for scales of superblocks before these are rounded to float16, as llama.cpp does for IQ4_XS."""
    before = sound(layout, x)
    outer = before.wanted[0].view(len(x), -1, 8)
    d = outer.gather(2, outer.abs().argmax(2, keepdim=True)) / -32
    scale = ((outer / d).round().clamp(-32, 31) * d).view(len(x), 1, -1, 1)
    return replace(before, codes=layout.grid.nearest((layout.groups(x.float()) / scale).nan_to_num(0.0, 0.0, 0.0)))


QUANTIZERS = (
    Quantizer("absolute maximum", sound, _always),
    Quantizer("search", search, lambda layout: not layout.two_levels),
    Quantizer("clipped a little", clipped_a_little, lambda layout: layout.family in ("AWQ", "INT4")),
    Quantizer("OCP", by_ocp, lambda layout: layout.family == "MX" or layout.name == "gpt-oss MXFP4"),
    Quantizer(
        "GPTQ",
        by_gptq,
        lambda layout: layout.name in ("GPTQ 4 bits", "GPTQ 4 bits asym", OF_LLM_COMPRESSOR),
        declared=declared_by_gptq,
    ),
    Quantizer(
        "stochastic",
        stochastic,
        lambda layout: layout.name in ("INT8 row", "CT INT4 g128", "GPTQ 8 bits"),
        declared=lambda layout: replace(layout, config={**layout.config, "rounding": "stochastic"}),
    ),
    Quantizer("ternary original", sound, _always, _ternary),
    Quantizer("zero groups", sound, _always, _zero_groups),
    Quantizer("tiny rows", sound, _always, _tiny_rows),
    Quantizer("heavy rows", sound, _always, _heavy_rows),
    Quantizer("rows of all sizes", scaled_before_rounding, lambda layout: layout.name == "IQ4_XS", _rows_of_all_sizes),
    Quantizer("huge values", sound, lambda layout: layout.family in ("MX", "GGUF", "HQQ", "quanto"), _huge_values),
    Quantizer("huge values by OCP", by_ocp, lambda layout: layout.family == "MX", _huge_values),
)


def sound_pairs(bench: Bench, layout: Layout) -> Iterator[Outcome]:
    """Quantize with every sound quantizer of a layout."""
    for quantizer in (quantizer for quantizer in QUANTIZERS if quantizer.fits(layout)):
        x = originals_of(layout)
        given = {name: quantizer.original(as_matrix(w)).view(w.shape) if w.dim() > 1 else w for name, w in x.items()}
        pair = make_pair(bench, quantizer.declared(layout), given, quantizer.quantize)
        yield sound_outcome(f"scales, {layout.family}", quantizer.name, pair)
