"""Recipes on synthetic weights: seeded, so that papers and tests of quantizers have the same numbers.

What makes real weights hard is here one at a time: tails, columns and rows of another size.
"""

from collections.abc import Callable, Sequence
from math import log10
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.errors import UsageError
from quanterr.recipes.base import Recipe
from quanterr.recipes.tensors import fake_quantized, stored_bytes

Make = Callable[[int, int, torch.Generator], Tensor]  # rows, columns → float32 (rows, columns)

DEGREES = 4  # of freedom of the heavy tails
OUTLIERS = 100  # columns, of which one is an outlier
LARGER = 20.0  # an outlier's standard deviation


def _gaussian(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    return torch.randn(rows, cols, generator=seeded)


def _uniform(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    return torch.rand(rows, cols, generator=seeded) * 2 - 1


def _heavy_tails(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    scale = torch.randn(DEGREES, rows, cols, generator=seeded).square().mean(0).sqrt()
    return _gaussian(rows, cols, seeded) / scale


def _outlier_columns(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    chosen = torch.randperm(cols, generator=seeded)[: max(cols // OUTLIERS, 1)]
    x = _gaussian(rows, cols, seeded)
    x[:, chosen] *= LARGER
    return x


def _channels(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    return torch.randn(rows, 1, generator=seeded).exp() * _gaussian(rows, cols, seeded)


WEIGHTS: dict[str, Make] = {
    "gaussian": _gaussian,
    "uniform": _uniform,
    "heavy tails": _heavy_tails,  # Student's t with 4 degrees of freedom
    "outlier columns": _outlier_columns,  # 1 % of them 20 times as large
    "channels": _channels,  # rows whose sizes are log-normal, sigma 1
}


class Measured(NamedTuple):
    """A recipe on a synthetic weight."""

    recipe: str
    weights: str
    bits_per_weight: float
    snr_db: float | None  # null: without error
    max_error: float  # of the weight's root mean square


def bench_formats(recipes: Sequence[Recipe], rows: int = 1024, cols: int = 4096, seed: int = 0) -> list[Measured]:
    """Each recipe on each kind of synthetic weight, float32 (rows, cols).

    Raises:
        UsageError: a shape that a recipe cannot store.
    """
    if rows < 1 or cols < 1:
        raise UsageError(f"--rows {rows} --columns {cols}: at least 1")
    found = []
    for name, make in WEIGHTS.items():
        x = make(rows, cols, torch.Generator().manual_seed(seed))
        energy = float(x.double().square().sum())
        for recipe in recipes:
            error = fake_quantized(x, recipe).double() - x.double()
            noise = float(error.square().sum())
            snr = 10 * log10(energy / noise) if noise else None
            bits = 8 * stored_bytes(x, recipe) / x.numel()
            found.append(Measured(recipe.name, name, bits, snr, float(error.abs().max()) / (energy / x.numel()) ** 0.5))
    return found
