"""The cost of outliers to a recipe, and the sensitivity of its error to the scales, measured on real weights.

A sample of each weight's rows is quantized again: without its largest elements, so that scales need not reach them;
without the columns of the largest importance, if known; and with stretched or shrunk scales.
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

SAMPLE = 256  # rows per weight, evenly spaced; blocks of several rows are formed from these
OUTLIERS = (0.01, 0.1, 1.0)  # percent of the elements
COLUMNS = 1.0  # percent of the columns
STRETCHES = (-10.0, -5.0, -1.0, 1.0, 5.0, 10.0)  # percent by which scales are changed


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
    noises = [[0.0] * (2 + len(OUTLIERS) + len(STRETCHES)) for _ in recipes]
    for name in chosen:
        for matrix in matrices_of(name, original.entries):
            x = _sample_rows(matrix)
            columns = None if importance is None else importance(matrix.name, matrix.shape)
            lesser = [*_zero_outliers(x), _zero_columns(x, columns)]
            for recipe, own in zip(recipes, noises, strict=True):
                if stop is not None and stop.is_set():
                    raise Interrupted("interrupted while outliers and scales were studied")
                if explain_refusal(x, recipe) is None:
                    found = _measure_noises(x, lesser, recipe)
                    own[:] = [total + noise for total, noise in zip(own, found, strict=True)]
    return [_make_study(recipe, own, importance is not None) for recipe, own in zip(recipes, noises, strict=True)]


def _sample_rows(matrix: Matrix) -> Tensor:
    """Read evenly spaced rows of a weight in its dtype."""
    rows = matrix.shape[0]
    n = min(rows, SAMPLE)
    places = [place * rows // n for place in range(n)]
    return torch.cat([matrix.read(place, place + 1).to(FLOATS[matrix.dtype], copy=True) for place in places])


def _zero_outliers(x: Tensor) -> list[Tensor]:
    """Return copies of the weight, in each of which a share of the largest elements is zero."""
    largest = x.abs().view(-1).float().topk(max(round(x.numel() * OUTLIERS[-1] / 100), 1)).indices
    found = []
    for percent in OUTLIERS:
        found.append(x.clone())
        found[-1].view(-1)[largest[: max(round(x.numel() * percent / 100), 1)]] = 0
    return found


def _zero_columns(x: Tensor, importance: Tensor | None) -> Tensor:
    """Return a copy of the weight in which the columns of the largest importance are zero."""
    if importance is None:
        return x
    kept = x.clone()
    kept[:, importance.topk(max(round(x.shape[1] * COLUMNS / 100), 1)).indices] = 0
    return kept


def _measure_noises(x: Tensor, lesser: Sequence[Tensor], recipe: Recipe) -> Iterator[float]:
    """Yield Σe²: unchanged, without each share of outliers, without columns, with each stretch of the scales."""
    own = _measure_noise(x, recipe)
    yield own
    yield from (own if kept is x else _measure_noise(kept, recipe) for kept in lesser)
    for percent in STRETCHES:
        yield _measure_noise(x, recipe, 1 + percent / 100) if _has_separate_scales(recipe) else own


def _has_separate_scales(recipe: Recipe) -> bool:
    """Return whether scales are stored apart from codes; ggml's types keep scales inside blocks."""
    return not isinstance(recipe.encoder, BlockEncoder)


def _measure_noise(x: Tensor, recipe: Recipe, stretch: float = 1.0) -> float:
    """Return Σe² over the nonzero elements, as zeros stand for removed elements."""
    error = (apply_recipe(x, recipe, stretch) - x.float()).masked_fill_(x == 0, 0)
    return float(error.square().sum(dtype=torch.float64))


def _make_study(recipe: Recipe, noises: Sequence[float], with_columns: bool) -> Study:
    """Convert Σe² values to a study: the change of each against the first, in dB."""
    own, *others = noises
    gains = [10 * log10(own / noise) if own and noise else None for noise in others]
    outliers = [Changed(percent, gain) for percent, gain in zip(OUTLIERS, gains, strict=False)]
    columns = [Changed(COLUMNS, gains[len(OUTLIERS)])] if with_columns else []
    stretched = gains[len(OUTLIERS) + 1 :] if _has_separate_scales(recipe) else [None] * len(STRETCHES)
    scales = [Changed(percent, gain) for percent, gain in zip(STRETCHES, stretched, strict=True)]
    return Study(recipe.name, outliers, scales, columns)
