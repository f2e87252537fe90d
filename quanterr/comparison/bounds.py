"""How fast a machine's memory lets the candidates of a sweep decode."""

import os
from collections.abc import Sequence
from contextlib import ExitStack

from quanterr.checkpoints import Checkpoint, entered
from quanterr.inspection import inspect
from quanterr.options import ComparisonOptions
from quanterr.recipes import Recipe
from quanterr.recipes.quantized_file import quantize_by
from quanterr.report.ranking.model import Ranking
from quanterr.selection import Selection


def with_bounds(
    ranking: Ranking,
    original: str | os.PathLike[str] | Checkpoint,
    recipes: Sequence[Recipe],
    options: ComparisonOptions,
    hardware: str,
) -> Ranking:
    """The ranking with the tokens a second that the bandwidth of a machine allows each recipe.

    Raises:
        UsageError: unknown hardware.
        CheckpointError: the original cannot be read.
    """
    found = {}
    with ExitStack() as stack:
        checkpoint = entered(stack, original, options.lenient, options.cache)
        for virtual in quantize_by(recipes, checkpoint, Selection(options.layers, options.exclude)):
            decode = inspect(virtual, hardware=hardware).decode
            found[virtual.path] = None if decode is None else decode.tokens_per_second
    for candidate in ranking.candidates:
        candidate.tokens_per_second = found.get(candidate.name)
    return ranking
