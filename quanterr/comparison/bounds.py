"""Bounds that a machine's memory bandwidth sets on the decoding speed of a sweep's candidates."""

from collections.abc import Sequence

from quanterr.checkpoints import Checkpoint
from quanterr.documents.ranking.model import Ranking
from quanterr.inspection import inspect
from quanterr.options import ComparisonOptions
from quanterr.recipes import Recipe
from quanterr.recipes.quantized_file import quantize_by


def add_bounds(
    ranking: Ranking,
    original: Checkpoint,
    recipes: Sequence[Recipe],
    options: ComparisonOptions,
    hardware: str,
) -> Ranking:
    """Add the tokens per second that a machine's bandwidth allows to each candidate of the ranking.

    Raises:
        UsageError: the hardware is unknown.
    """
    rates = {}
    for virtual in quantize_by(recipes, original, options.selection):
        decode = inspect(virtual, hardware=hardware).decode
        rates[virtual.path] = None if decode is None else decode.tokens_per_second
    for candidate in ranking.candidates:
        candidate.tokens_per_second = rates.get(candidate.name)
    return ranking
