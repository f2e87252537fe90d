"""Errors of recipes on synthetic weights, which are seeded so that papers and tests of quantizers can repeat them.

Each kind of weight has one property that makes real weights hard to quantize: heavy tails, or columns or rows of
other magnitudes.
"""

from collections.abc import Callable, Sequence
from math import log10
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Recipe
from quanterr.recipes.tensors import apply_recipe, count_stored_bytes

Make = Callable[[int, int, torch.Generator], Tensor]  # rows, columns and a generator to float32 (rows, columns)

TAIL_FREEDOM = 4  # degrees of freedom of the heavy tails
COLUMNS_PER_OUTLIER = 100  # one column of this number is an outlier
OUTLIER_DEVIATION = 20.0  # standard deviation of an outlier


def _gaussian(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    return torch.randn(rows, cols, generator=seeded)


def _uniform(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    return torch.rand(rows, cols, generator=seeded) * 2 - 1


def _heavy_tails(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    scale = torch.randn(TAIL_FREEDOM, rows, cols, generator=seeded).square().mean(0).sqrt()
    return _gaussian(rows, cols, seeded) / scale


def _outlier_columns(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    chosen = torch.randperm(cols, generator=seeded)[: max(cols // COLUMNS_PER_OUTLIER, 1)]
    x = _gaussian(rows, cols, seeded)
    x[:, chosen] *= OUTLIER_DEVIATION
    return x


def _channels(rows: int, cols: int, seeded: torch.Generator) -> Tensor:
    return torch.randn(rows, 1, generator=seeded).exp() * _gaussian(rows, cols, seeded)


WEIGHTS: dict[str, Make] = {
    "gaussian": _gaussian,
    "uniform": _uniform,
    "heavy tails": _heavy_tails,  # Student's t with 4 degrees of freedom
    "outlier columns": _outlier_columns,  # 1 % of the columns are 20 times as large
    "channels": _channels,  # row magnitudes are log-normal, sigma 1
}


class BenchResult(NamedTuple):
    """The result of a recipe on a synthetic weight."""

    recipe: str
    weights: str
    bits_per_weight: float
    snr_db: float | None  # None if there is no error
    max_error: float  # largest |error|, relative to the weight's root mean square


def bench_formats(recipes: Sequence[Recipe], rows: int = 1024, cols: int = 4096, seed: int = 0) -> list[BenchResult]:
    """Measure each recipe on each kind of synthetic weight, float32 (rows, cols).

    Raises:
        UsageError: a recipe cannot store the shape.
    """
    results = []
    for name, make in WEIGHTS.items():
        x = make(rows, cols, torch.Generator().manual_seed(seed))
        energy = float(x.double().square().sum())
        for recipe in recipes:
            error = apply_recipe(x, recipe).double() - x.double()
            noise = float(error.square().sum())
            snr = 10 * log10(energy / noise) if noise else None
            bits = 8 * count_stored_bytes(x, recipe) / x.numel()
            results.append(
                BenchResult(recipe.name, name, bits, snr, float(error.abs().max()) / (energy / x.numel()) ** 0.5)
            )
    return results
