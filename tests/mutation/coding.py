"""Quantization as data: grids, groups, how scales are rounded; codes, and what they stand for in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log10
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mutation.judging import Loss, Pair, loss

Rounding = Callable[[Tensor], Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_ERROR = 2.0**-4  # largest relative error of a normal number
SEARCHED = torch.linspace(0.7, 1.3, 9)


class Grid(NamedTuple):
    """The values of codes: integers, a table, or E4M3."""

    low: float
    high: float
    table: Tensor | None = None
    e4m3: bool = False

    @property
    def best_db(self) -> float:
        """An SNR that only luck exceeds: of numbers near the largest code, which a scale may make exact."""
        if self.e4m3:
            return 31.5
        step = 1.0 if self.table is None else float(self.table.diff().max())
        return 20 * log10(self.high / step * 12**0.5)

    def nearest(self, numbers: Tensor) -> Tensor:
        """Return the numbers of the grid nearest to these."""
        kept = numbers.clamp(self.low, self.high)
        if self.e4m3:
            return kept.to(torch.float8_e4m3fn).to(numbers.dtype)
        if self.table is None:
            return kept.round()
        middles = (self.table[1:] + self.table[:-1]) / 2
        return self.table[torch.bucketize(kept.contiguous(), middles)]


def integers(low: int, high: int) -> Grid:
    """Return a grid of all integers from ``low`` to ``high``."""
    return Grid(low, high)


def of_table(values: Any) -> Grid:
    """Return a grid of the sorted values of a table."""
    table = torch.tensor(sorted(values), dtype=torch.float32)
    return Grid(float(table[0]), float(table[-1]), table)


SIGNED_E2M1 = of_table([*E2M1, *(-value for value in E2M1[1:])])
E4M3 = Grid(-448.0, 448.0, None, True)


class Stored(NamedTuple):
    """The scales and shifts that a file can hold, (groups down, groups across), and the tensors that hold them."""

    scale: Tensor
    shift: Tensor | None = None
    parts: dict[str, Tensor] = {}  # noqa: RUF012


@dataclass(frozen=True, eq=False)
class Layout:
    """The way a layout stores a weight, without its bytes: weight = code · scale + shift."""

    name: str
    family: str
    grid: Grid
    group: tuple[int, int]  # rows and columns that share a scale; 0: all
    keep: Callable[[Tensor, Tensor | None, float], Stored]  # scales, shifts, a factor of what several scales share
    store: Callable[[str, "Coded"], Any]  # tensors by name, or a GGUF type and bytes
    shifted: bool = False  # there are zero points, or minima
    signed: bool = False  # the scale has the sign that gives the largest value the lowest code
    two_levels: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def groups(self, x: Tensor) -> Tensor:
        """Return a matrix as (groups down, rows, groups across, cols)."""
        rows, cols = (size or whole for size, whole in zip(self.group, x.shape, strict=True))
        return x.view(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


@dataclass
class Coded:
    """A weight as stored: codes in the shape of Layout.groups, scales, and the values that they stand for."""

    layout: Layout
    shape: tuple[int, int]
    codes: Tensor
    stored: Stored
    wanted: tuple[Tensor, Tensor | None]  # scales and shifts before they were rounded

    @property
    def matrix(self) -> Tensor:
        """The codes as (rows, cols)."""
        return self.codes.reshape(self.shape)

    @cached_property
    def values(self) -> Tensor:
        """The values of the codes, (rows, cols) float64."""
        y = self.codes.double() * _spread(self.stored.scale.double())
        if self.stored.shift is not None:
            y += _spread(self.stored.shift.double())
        return y.reshape(self.shape)


def measure_loss(x: Tensor, before: Coded, after: Coded) -> Loss:
    """Return how many dB a weight loses by a change of its codes or scales.

    An element as near to its value as E4M3 is to any number has lost nothing, even if it was nearer before.
    """
    grid, values = before.layout.grid, after.values
    if grid.e4m3:
        near = (values - x).abs() <= E4M3_ERROR * x.abs()
        values = torch.where(near, before.values, values)
    return loss(Pair(x, before.values), Pair(x, values), grid.best_db)


def _spread(scales: Tensor) -> Tensor:
    return scales[:, None, :, None]


def fit(layout: Layout, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scales that use all codes, and shifts where the layout has them, float32."""
    groups = layout.groups(x.float())
    if layout.shifted:
        low, high = groups.amin((1, 3)).clamp(max=0), groups.amax((1, 3)).clamp(min=0)
        scale = (high - low) / (layout.grid.high - layout.grid.low)
        return scale.clamp(min=1e-12), low - layout.grid.low * scale
    largest = groups.abs().amax((1, 3))
    if layout.signed and layout.two_levels and layout.grid.table is None:
        return _least_squares(layout, groups), None
    if layout.signed:
        negative = groups.amin((1, 3)).neg() >= groups.amax((1, 3))
        return torch.where(negative, 1.0, -1.0) * largest.clamp(min=1e-12) / -layout.grid.low, None
    return (largest / layout.grid.high).clamp(min=1e-12), None


def _least_squares(layout: Layout, groups: Tensor) -> Tensor:
    """Return the scales of Q3_K and Q6_K by llama.cpp's make_qx_quants: the best of 19, weighted by squares."""
    x = groups.permute(0, 2, 1, 3).flatten(2)
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    best, chosen = torch.zeros_like(largest), torch.full_like(largest, 1e-12)
    for step in (torch.arange(-9, 10) / 10).tolist():
        codes = layout.grid.nearest((x * ((layout.grid.low - step) / largest)).nan_to_num(0.0))
        xl, ll = ((x.square() * side).sum(2, keepdim=True) for side in (x * codes, codes.square()))
        better = xl.square() > best * ll
        best = torch.where(better, xl.square() / ll, best)
        chosen = torch.where(better, xl / ll, chosen)
    return chosen[..., 0]


def code(
    layout: Layout,
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    shared: float = 1.0,
    codes: Tensor | None = None,
) -> Coded:
    """Return the weight with these scales, as they can be stored, and the given codes or else the nearest."""
    stored = layout.keep(scale, shift, shared)
    if codes is None:
        numbers = layout.groups(x.float())
        if stored.shift is not None:
            numbers = numbers - _spread(stored.shift.float())
        units = _spread(stored.scale.float())
        codes = layout.grid.nearest((numbers / units).nan_to_num(0.0, layout.grid.high, layout.grid.low))
    return Coded(layout, (x.shape[0], x.shape[1]), codes, stored, (scale, shift))


def sound(layout: Layout, x: Tensor) -> Coded:
    """Quantize plainly."""
    return code(layout, x, *fit(layout, x))


def search(layout: Layout, x: Tensor) -> Coded:
    """Quantize with the best of several scales around those that use all codes."""
    scale, shift = fit(layout, x)
    best = torch.full_like(scale, torch.inf)
    chosen, chosen_shift = scale.clone(), None if shift is None else shift.clone()
    for by in SEARCHED.tolist():
        tried = code(layout, x, scale * by, None if shift is None else shift * by)
        lost = layout.groups((tried.values - x.double()).square()).sum((1, 3)).float()
        better = lost < best
        best = torch.where(better, lost, best)
        chosen = torch.where(better, tried.wanted[0], chosen)
        if chosen_shift is not None and tried.wanted[1] is not None:
            chosen_shift = torch.where(better, tried.wanted[1], chosen_shift)
    return code(layout, x, chosen, chosen_shift)


def stochastic(layout: Layout, x: Tensor) -> Coded:
    """Quantize to integers, each rounded up or down at random, in proportion to the distances."""
    plain = sound(layout, x)
    shift = 0.0 if plain.stored.shift is None else _spread(plain.stored.shift)
    numbers = (layout.groups(x.double()) - shift) / _spread(plain.stored.scale.double())
    noise = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return replace(plain, codes=(numbers + noise).floor().clamp(layout.grid.low, layout.grid.high).float())


def compensate(layout: Layout, x: Tensor, inputs: Tensor, largest_first: bool = False) -> Coded:
    """Quantize with GPTQ: later columns compensate the error of each, by the correlation of inputs, (n, cols).

    With ``largest_first``, columns of large inputs come first, and groups stay as they are ("static" of
    llm-compressor).
    """
    plain = sound(layout, x)
    hessian = inputs.double().T @ inputs.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    rows, cols = x.shape
    order = hessian.diagonal().argsort(descending=True) if largest_first else torch.arange(cols)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    left = x.double()[:, order]
    shape = layout.groups(x).shape
    scale, shift = (
        None if part is None else part[:, None, :, None].expand(shape).reshape(rows, cols).double()[:, order]
        for part in plain.stored[:2]
    )
    codes = torch.empty(rows, cols)
    assert scale is not None
    for start in range(0, cols, 128):
        stop = min(start + 128, cols)
        errors = torch.empty(rows, stop - start, dtype=torch.float64)
        for col in range(start, stop):
            moved = left[:, col] if shift is None else left[:, col] - shift[:, col]
            codes[:, col] = layout.grid.nearest((moved / scale[:, col]).float())
            y = codes[:, col].double() * scale[:, col] + (0 if shift is None else shift[:, col])
            errors[:, col - start] = (left[:, col] - y) / inverse[col, col]
            left[:, col + 1 : stop] -= errors[:, col - start, None] * inverse[col, col + 1 : stop]
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return replace(plain, codes=layout.groups(codes[:, order.argsort()]))
