"""What outliers cost a recipe, and how its error changes with the scales, measured on real weights.

A sample of each weight's rows is quantized again: without its largest elements, so that scales need not cover them;
without the columns of the largest importance, if known; and with larger or smaller scales.
"""

import threading
from collections.abc import Iterator, Sequence
from math import log10

from quanterr.checkpoints import Checkpoint
from quanterr.documents.ranking.model import Changed, Study
from quanterr.errors import Interrupted
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import FLOATS, Recipe
from quanterr.recipes.blocks import BlockEncoder
from quanterr.recipes.matrices import Matrix, matrices_of
from quanterr.recipes.quantized_file import ImportanceOf, choose_weights
from quanterr.recipes.tensors import apply_recipe, explain_refusal
from quanterr.selection import LayerSelection

SAMPLED_ROWS = 256  # rows per weight, evenly spaced; blocks of several rows are formed from these
OUTLIER_PERCENTS = (0.01, 0.1, 1.0)  # percent of the elements
COLUMN_PERCENT = 1.0  # percent of the columns
STRETCH_PERCENTS = (-10.0, -5.0, -1.0, 1.0, 5.0, 10.0)  # percent by which scales are changed


def study_recipes(
    original: Checkpoint,
    recipes: Sequence[Recipe],
    selection: LayerSelection,
    stop: threading.Event | None = None,
    importance: ImportanceOf | None = None,
) -> list[Study]:
    """Study each recipe on a sample of rows of every selected weight that it can store.

    ``importance`` returns the importance of a weight's columns, if known.

    Raises:
        CheckpointError: a weight cannot be read, or holds NaN or infinity.
        Interrupted: ``stop`` was set.
    """
    chosen, _ = choose_weights(original, selection)
    noises = [[0.0] * (2 + len(OUTLIER_PERCENTS) + len(STRETCH_PERCENTS)) for _ in recipes]
    for name in chosen:
        for matrix in matrices_of(name, original.entries):
            x = _sample_rows(matrix)
            columns = None if importance is None else importance(matrix.name, matrix.shape)
            lesser = [*_zero_outliers(x), _zero_columns(x, columns)]
            for recipe, totals in zip(recipes, noises, strict=True):
                if stop is not None and stop.is_set():
                    raise Interrupted("interrupted while outliers and scales were studied")
                if explain_refusal(x, recipe) is None:
                    noises_of_matrix = _measure_noises(x, lesser, recipe)
                    totals[:] = [total + noise for total, noise in zip(totals, noises_of_matrix, strict=True)]
    return [_make_study(recipe, totals, importance is not None) for recipe, totals in zip(recipes, noises, strict=True)]


def _sample_rows(matrix: Matrix) -> Tensor:
    """Read evenly spaced rows of a weight in its dtype."""
    rows = matrix.shape[0]
    n = min(rows, SAMPLED_ROWS)
    places = [place * rows // n for place in range(n)]
    return torch.cat([matrix.read(place, place + 1).to(FLOATS[matrix.dtype], copy=True) for place in places])


def _zero_outliers(x: Tensor) -> list[Tensor]:
    """Return copies of the weight, in each of which a larger share of the largest elements is set to zero."""
    largest = x.abs().view(-1).float().topk(max(round(x.numel() * OUTLIER_PERCENTS[-1] / 100), 1)).indices
    copies = []
    for percent in OUTLIER_PERCENTS:
        copies.append(x.clone())
        copies[-1].view(-1)[largest[: max(round(x.numel() * percent / 100), 1)]] = 0
    return copies


def _zero_columns(x: Tensor, importance: Tensor | None) -> Tensor:
    """Return a copy of the weight in which the columns of the largest importance are set to zero."""
    if importance is None:
        return x
    kept = x.clone()
    kept[:, importance.topk(max(round(x.shape[1] * COLUMN_PERCENT / 100), 1)).indices] = 0
    return kept


def _measure_noises(x: Tensor, lesser: Sequence[Tensor], recipe: Recipe) -> Iterator[float]:
    """Yield Σe²: unchanged, without each share of outliers, without columns, with each stretch of the scales."""
    unchanged = _measure_noise(x, recipe)
    yield unchanged
    yield from (unchanged if kept is x else _measure_noise(kept, recipe) for kept in lesser)
    for percent in STRETCH_PERCENTS:
        yield _measure_noise(x, recipe, 1 + percent / 100) if _has_separate_scales(recipe) else unchanged


def _has_separate_scales(recipe: Recipe) -> bool:
    """Return whether scales are stored apart from codes; ggml's types keep scales inside blocks."""
    return not isinstance(recipe.encoder, BlockEncoder)


def _measure_noise(x: Tensor, recipe: Recipe, stretch: float = 1.0) -> float:
    """Return Σe² over the nonzero elements, as zeros stand for removed elements."""
    error = (apply_recipe(x, recipe, stretch) - x.float()).masked_fill_(x == 0, 0)
    return float(error.square().sum(dtype=torch.float64))


def _make_study(recipe: Recipe, noises: Sequence[float], with_columns: bool) -> Study:
    """Return a study: the change of the error in dB, of each Σe² relative to the first one."""
    unchanged, *others = noises
    gains = [10 * log10(unchanged / noise) if unchanged and noise else None for noise in others]
    outliers = [Changed(percent, gain) for percent, gain in zip(OUTLIER_PERCENTS, gains, strict=False)]
    columns = [Changed(COLUMN_PERCENT, gains[len(OUTLIER_PERCENTS)])] if with_columns else []
    stretched = gains[len(OUTLIER_PERCENTS) + 1 :] if _has_separate_scales(recipe) else [None] * len(STRETCH_PERCENTS)
    scales = [Changed(percent, gain) for percent, gain in zip(STRETCH_PERCENTS, stretched, strict=True)]
    return Study(recipe.name, outliers, scales, columns)
