"""What outliers cost a recipe, and how much its error depends on its scales, measured on real weights.

Of each weight a sample of rows is quantized again: without its largest elements, which stay as they are, so that scales
need not reach them; without the columns of the largest importance, where that is known; and with what scales are made
of stretched or shrunk.
"""

import threading
from collections.abc import Iterator, Sequence
from math import log10

import torch
from torch import Tensor

from quanterr.checkpoints import Checkpoint
from quanterr.errors import Interrupted
from quanterr.recipes.base import FLOATS, Recipe
from quanterr.recipes.blocks import Blocks
from quanterr.recipes.candidate import ImportanceOf, choose
from quanterr.recipes.matrices import Matrix, matrices_of
from quanterr.recipes.tensors import fake_quantized, refusal
from quanterr.report.ranking.model import Changed, Study
from quanterr.selection import Selection

SAMPLE = 256  # rows of a weight, evenly spaced; with blocks of more than a row those are of the sample
OUTLIERS = (0.01, 0.1, 1.0)  # per cent of the elements
COLUMNS = 1.0  # per cent of the columns
STRETCHES = (-10.0, -5.0, -1.0, 1.0, 5.0, 10.0)  # per cent


def studied(
    original: Checkpoint,
    recipes: Sequence[Recipe],
    selection: Selection,
    stop: threading.Event | None = None,
    importance: ImportanceOf | None = None,
) -> list[Study]:
    """Each recipe on a sample of rows of every selected weight that it can store.

    ``importance`` gives that of the columns of a weight, where it is known.

    Raises:
        CheckpointError: a weight cannot be read, or holds NaN or infinity.
        Interrupted: ``stop`` was set.
    """
    chosen, _ = choose(original, selection)
    noises = [[0.0] * (2 + len(OUTLIERS) + len(STRETCHES)) for _ in recipes]
    for name in chosen:
        for matrix in matrices_of(name, original.entries):
            x = _sampled(matrix)
            columns = None if importance is None else importance(matrix.name, matrix.shape)
            lesser = [*_without_outliers(x), _without_columns(x, columns)]
            for recipe, own in zip(recipes, noises, strict=True):
                if stop is not None and stop.is_set():
                    raise Interrupted("interrupted while outliers and scales were studied")
                if refusal(x, recipe) is None:
                    own[:] = [total + noise for total, noise in zip(own, _noises(x, lesser, recipe), strict=True)]
    return [_study(recipe, own, importance is not None) for recipe, own in zip(recipes, noises, strict=True)]


def _sampled(matrix: Matrix) -> Tensor:
    """Read some rows of a weight, in its dtype."""
    rows = matrix.shape[0]
    n = min(rows, SAMPLE)
    places = [place * rows // n for place in range(n)]
    return torch.cat([matrix.read(place, place + 1).to(FLOATS[matrix.dtype], copy=True) for place in places])


def _without_outliers(x: Tensor) -> list[Tensor]:
    """The weight with zeros in the place of each share of its largest elements."""
    largest = x.abs().view(-1).float().topk(max(round(x.numel() * OUTLIERS[-1] / 100), 1)).indices
    found = []
    for percent in OUTLIERS:
        found.append(x.clone())
        found[-1].view(-1)[largest[: max(round(x.numel() * percent / 100), 1)]] = 0
    return found


def _without_columns(x: Tensor, importance: Tensor | None) -> Tensor:
    """The weight with zeros in the place of the columns of the largest importance."""
    if importance is None:
        return x
    kept = x.clone()
    kept[:, importance.topk(max(round(x.shape[1] * COLUMNS / 100), 1)).indices] = 0
    return kept


def _noises(x: Tensor, lesser: Sequence[Tensor], recipe: Recipe) -> Iterator[float]:
    """Σe² as it is, without each share of outliers, without columns, with each stretch of the scales."""
    own = _noise(x, recipe)
    yield own
    yield from (own if kept is x else _noise(kept, recipe) for kept in lesser)
    for percent in STRETCHES:
        yield _noise(x, recipe, 1 + percent / 100) if _stretches(recipe) else own


def _stretches(recipe: Recipe) -> bool:
    """Whether scales are apart from the codes: those of ggml's types are in their blocks."""
    return not isinstance(recipe.scheme, Blocks)


def _noise(x: Tensor, recipe: Recipe, stretch: float = 1.0) -> float:
    """Σe²; elements that are zero have none, whatever the recipe makes of them."""
    error = (fake_quantized(x, recipe, stretch) - x.float()).masked_fill_(x == 0, 0)
    return float(error.square().sum(dtype=torch.float64))


def _study(recipe: Recipe, noises: Sequence[float], with_columns: bool) -> Study:
    """In dB of the error as it is."""
    own, *others = noises
    gains = [10 * log10(own / noise) if own and noise else None for noise in others]
    outliers = [Changed(percent, gain) for percent, gain in zip(OUTLIERS, gains, strict=False)]
    columns = [Changed(COLUMNS, gains[len(OUTLIERS)])] if with_columns else []
    stretched = gains[len(OUTLIERS) + 1 :] if _stretches(recipe) else [None] * len(STRETCHES)
    scales = [Changed(percent, gain) for percent, gain in zip(STRETCHES, stretched, strict=True)]
    return Study(recipe.name, outliers, scales, columns)
