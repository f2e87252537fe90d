"""Damage that no method causes, to whole models and to single weights.

It rounds one way, takes random codes, clips, or wastes the range of codes. Where a config names GPTQ or AWQ, that
method makes the codes before they are damaged.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mutation.coding import Coded, Layout, code, fit, measure_loss, sound
from mutation.judging import Outcome, worst
from mutation.originals import make_generator
from mutation.pairs import Bench, Case, Sound, as_matrix, make_pair
from mutation.scales import ONE, by_gptq, declared_by_gptq
from mutation.sources import lora, train

BY_GPTQ = ("GPTQ 4 bits", "GPTQ 4 bits asym", "CT INT4 g128")
ROWS = 4  # damaged rows, unless all are
Damage = Callable[[Layout, Tensor, Coded], Coded | None]


SYMMETRIC = "GPTQ's symmetric 2 bits have these zero points with these scales: 2 and 2 / 3 of the largest value"
DIRECTED = "GPTQ of 2 bits leaves rows of real weights at -10 dB, in directions that rows share, as a LoRA does"
FINER = "runs far below the largest value of their row lose 6 to 8 dB, the layer 0.2, as after a search by importance"
SEARCHED = "searches of scales of 4 bits, as AutoAWQ's and HQQ's, choose 0.85 of the largest value too"


class Kind(NamedTuple):
    """A damage, of every weight or of one."""

    name: str
    damage: Damage
    everywhere: bool = True


def _numbers(before: Coded, x: Tensor) -> Tensor:
    """Return values in units of codes, in the shape of the codes."""
    layout, (scale, shift, _) = before.layout, before.stored
    numbers = layout.groups(x.float())
    if shift is not None:
        numbers = numbers - shift[:, None, :, None]
    return (numbers / scale[:, None, :, None]).nan_to_num(0.0, 0.0, 0.0)


def _with_codes(before: Coded, codes: Tensor) -> Coded:
    grid = before.layout.grid
    return Coded(before.layout, before.shape, grid.nearest(codes.clamp(grid.low, grid.high)), before.stored,
                 before.wanted)  # fmt: skip


def round_down(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Round every code down."""
    if layout.grid.table is not None or layout.grid.e4m3:
        return None
    return _with_codes(before, (_numbers(before, x) + 1e-4).floor())


def round_up(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Round every code up."""
    if layout.grid.table is not None or layout.grid.e4m3:
        return None
    return _with_codes(before, (_numbers(before, x) - 1e-4).ceil())


def truncate(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Round every code towards zero."""
    if layout.grid.table is not None or layout.grid.e4m3 or layout.shifted:
        return None
    return _with_codes(before, _numbers(before, x).trunc())


def shaken(layout: Layout, _x: Tensor, before: Coded) -> Coded | None:
    """Move one code of ten by a step."""
    if layout.grid.table is not None or layout.grid.e4m3:
        return None
    generator = make_generator(5)
    steps = torch.randint(0, 2, before.codes.shape, generator=generator) * 2 - 1
    return _with_codes(before, before.codes + steps * (torch.rand(before.codes.shape, generator=generator) < 0.1))


def scale_by(factor: float) -> Damage:
    """Return a damage that takes the nearest codes with scales that are too wide or too narrow."""

    def damage(layout: Layout, x: Tensor, _before: Coded | None = None) -> Coded:
        scale, shift = fit(layout, x)
        return code(layout, x, factor * scale, None if shift is None else factor * shift)

    return damage


def clip(layout: Layout, x: Tensor, _before: Coded) -> Coded | None:
    """Clip some rows at 0.85 of their largest value, or the whole weight if it has one scale."""
    scale, shift = fit(layout, x)
    factor = torch.ones_like(scale)
    factor[:: max(len(scale) // ROWS, 1)] = 0.85
    return code(layout, x, factor * scale, None if shift is None else factor * shift)


def move_to_middle(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Move the zero points to the middle and keep scales that were made for other zero points."""
    if not layout.shifted:
        return None
    scale, _ = before.wanted
    return code(layout, x, scale, -scale * round((layout.grid.high + layout.grid.low) / 2))


def noisy(share: float) -> Damage:
    """Return a damage that adds noise, a share of the weight's norm, before it quantizes."""
    return lambda layout, x, _before: sound(layout, train(share)(x))


def merge_lora(layout: Layout, x: Tensor, _before: Coded) -> Coded | None:
    """Merge a LoRA before quantizing."""
    return sound(layout, lora(0.15)(x))


def noisy_row(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Add noise of a third to a few rows."""
    y, generator = x.float().clone(), make_generator(4)
    rows = torch.arange(3, len(y), max(len(y) // ROWS, 1))
    noise = torch.randn(len(rows), y.shape[1], generator=generator)
    y[rows] += 0.3 * noise * y[rows].square().mean(1, keepdim=True).sqrt()
    return code(layout, y, *before.wanted)


def multiply_rows(by: float) -> Damage:
    """Return a damage that multiplies a few rows by a factor."""

    def damage(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
        y = x.float().clone()
        y[3 :: max(len(y) // ROWS, 1)] *= by
        return code(layout, y, *before.wanted)

    return damage


def multiply_column(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Multiply one column by 1.05."""
    y = x.float().clone()
    y[:, 5] *= 1.05
    return code(layout, y, *before.wanted)


def twice(bits: int) -> Damage:
    """Quantize values that integers had rounded before, one scale for 128 of a row, or for a row of 8 bits."""

    def damage(layout: Layout, x: Tensor, _before: Coded) -> Coded | None:
        largest = 2 ** (bits - 1) - 1
        groups = x.float().unflatten(1, (-1, 128 if bits < 8 and x.shape[1] % 128 == 0 else x.shape[1]))
        scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-12) / largest
        return sound(layout, ((groups / scale).round() * scale).flatten(1).to(x.dtype))

    return damage


def clear_block(layout: Layout, x: Tensor, before: Coded) -> Coded | None:
    """Set a block of 8 × 8 to zero."""
    y = x.float().clone()
    y[40:48, 64:72] = 0
    return code(layout, y, *before.wanted)


def exchange_columns(_layout: Layout, _x: Tensor, before: Coded) -> Coded | None:
    """Exchange the codes of two columns."""
    codes = before.matrix.clone()
    codes[:, [3, codes.shape[1] - 12]] = codes[:, [codes.shape[1] - 12, 3]]
    return replace(before, codes=codes.view(before.codes.shape))


def lowest(layout: Layout, _x: Tensor, before: Coded) -> Coded | None:
    """Zero the stored bits of 8 × 16 codes."""
    codes = before.matrix.clone()
    codes[:8, :16] = layout.grid.low
    return replace(before, codes=codes.view(before.codes.shape))


def shift_zeros(share: float) -> Damage:
    """Return a damage that moves a share of the zero points by one."""

    def damage(_layout: Layout, _x: Tensor, before: Coded) -> Coded | None:
        scale, shift, _ = before.stored
        if shift is None:
            return None
        off = torch.rand(scale.shape, generator=make_generator(7)) < share
        kept = before.layout.keep(scale, torch.where(off, shift + scale, shift), 1.0)
        return replace(before, stored=kept)

    return damage


def round_scales(layout: Layout, _x: Tensor, before: Coded) -> Coded | None:
    """Round scales of superblocks, or of codes of 8 bits, to 4 bits of mantissa, as E4M3 holds them; keep the codes."""
    parts = before.stored.parts
    if layout.family in ("INT8", "FP8") and not layout.shifted:
        return replace(before, stored=before.stored._replace(scale=_as_e4m3(before.stored.scale)))
    if "d" not in parts:
        return None
    d = _as_e4m3(parts["d"])
    scale = before.stored.scale.view(*d.shape, -1) * (d / torch.where(d == 0, 1.0, parts["d"]))[..., None]
    return replace(before, stored=before.stored._replace(scale=scale.flatten(1), parts={**parts, "d": d}))


def _as_e4m3(scales: Tensor) -> Tensor:
    mantissa, exponent = scales.frexp()
    return (mantissa * 16).round().ldexp(exponent - 4)


after_int8 = twice(8)
KINDS = (
    Kind("floored", round_down),
    Kind("ceiled", round_up),
    Kind("truncated", truncate),
    Kind("floored", round_down, False),
    Kind("one code of ten off", shaken),
    Kind("one code of ten off", shaken, False),
    Kind("scales × 1.3", scale_by(1.3)),
    Kind("scales × 1.6", scale_by(1.6)),
    Kind("scales × 0.75", scale_by(0.75)),
    Kind("zero points in the middle", move_to_middle),
    Kind("zero points in the middle", move_to_middle, False),
    Kind("rows clipped", clip),
    Kind("rows clipped", clip, False),
    Kind("noise of 15 %", noisy(0.15)),
    Kind("LoRA", merge_lora, False),
    Kind("noisy rows", noisy_row, False),
    Kind("rows × 1.05", multiply_rows(1.05), False),
    Kind("rows × 1.02", multiply_rows(1.02), False),
    Kind("one column × 1.05", multiply_column, False),
    Kind("8 × 8 zeroed", clear_block, False),
    Kind("two columns exchanged", exchange_columns, False),
    Kind("8 × 16 codes without bits", lowest, False),
    Kind("5 % of zero points off", shift_zeros(0.05)),
    Kind("5 % of zero points off", shift_zeros(0.05), False),
    Kind("20 % of zero points off", shift_zeros(0.2)),
    Kind("scales rounded", round_scales),
    Kind("scales rounded", round_scales, False),
    Kind("INT8 before", after_int8),
    Kind("INT8 before", after_int8, False),
    Kind("INT4 before", twice(4)),
    Kind("INT4 before", twice(4), False),
)


def outcomes(bench: Bench, layout: Layout) -> Iterator[Outcome]:
    """Damage the codes of a layout in every way."""
    compensates = layout.name in BY_GPTQ
    layout = declared_by_gptq(layout) if compensates else layout
    by, excuse = (by_gptq, "the suite's GPTQ, declared") if compensates else (sound, "")
    yield from damage_pair(make_pair(bench, layout, by=by, excuse=excuse), f"methods, {layout.family}")


def damage_pair(pair: Sound, family: str, weight_name: str = ONE, kinds: Iterable[Kind] = KINDS) -> Iterator[Outcome]:
    """Damage a pair in every way; ``weight_name`` is the weight that is damaged, unless all are."""
    for kind in kinds:
        if case := _case(pair, kind, weight_name):
            yield pair.outcome(family, case)


def _case(pair: Sound, kind: Kind, weight_name: str) -> Case | None:
    """Return the case of a damage: the damaged weights and what they lose."""
    before = {name: weight for name, weight in pair.weights.items() if isinstance(weight, Coded)}
    changed, losses = {}, []
    for name in before if kind.everywhere else [weight_name]:
        x = as_matrix(pair.x[name])
        if after := kind.damage(pair.layout, x, before[name]):
            changed[name] = after
            losses.append(measure_loss(x, before[name], after))
    where, grid = "all" if kind.everywhere else "one", pair.layout.grid
    levels = len(grid.table) if grid.table is not None else grid.high - grid.low + 1
    why = {clip: SEARCHED, after_int8: FINER}.get(kind.damage, "") if levels <= 16 else ""
    if pair.layout.family == "GPTQ" and levels <= 4:
        why = {move_to_middle: SYMMETRIC, merge_lora: DIRECTED}.get(kind.damage, why)
    return Case(f"{where}: {kind.name}", changed, worst(losses), why_silent=why) if changed else None
