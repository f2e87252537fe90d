"""The inputs of a comparison, or of a sweep: checkpoints, recipes, importance and sensitivities."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.documents.sensitivity import Sensitivity, read_sensitivity
from quanterr.options import ComparisonOptions
from quanterr.pairing.importance import Means, make_importance_lookup, read_importance
from quanterr.selection import LayerSelection

if TYPE_CHECKING:
    from quanterr.recipes import Recipe

Path = str | os.PathLike[str]
STORED_TYPES = (str, os.PathLike, Checkpoint)  # types of candidates that are not recipes


class Inputs(NamedTuple):
    """The checkpoints to compare, the selected layers, and the importance and sensitivities, if given."""

    original: Checkpoint
    candidates: list[Checkpoint]
    selection: LayerSelection
    means: Means | None  # mean squares from an importance matrix
    sensitivity: Sensitivity | None


@contextmanager
def open_inputs(
    original: Path | Checkpoint, candidates: "Sequence[Path | Checkpoint | Recipe]", options: ComparisonOptions
) -> Iterator[Inputs]:
    """Open the inputs of a run, and close those at its end that were given as paths.

    Raises the errors of :func:`quanterr.open_checkpoint`, and those of a damaged importance matrix or sensitivity.
    """
    sensitivity = None if options.sensitivity is None else read_sensitivity(os.fspath(options.sensitivity))
    sides = [original, *(side for side in candidates if isinstance(side, STORED_TYPES))]
    with open_checkpoints(sides, options.lenient, options.cache) as [before, *others]:
        means = None if options.importance is None else read_importance(options.importance)
        recipes = [side for side in candidates if not isinstance(side, STORED_TYPES)]
        selection = options.selection
        stored, quantized = iter(others), _quantize(recipes, before, selection, means)
        after = [next(stored if isinstance(side, STORED_TYPES) else quantized) for side in candidates]
        yield Inputs(before, after, selection, means, sensitivity)


def _quantize(
    recipes: "Sequence[Recipe]", original: Checkpoint, selection: LayerSelection, means: Means | None
) -> Iterator[Checkpoint]:
    """Quantize the original by each recipe, on the fly; recipes are imported only if there are any."""
    if recipes:
        from quanterr.recipes.quantized_file import quantize_by

        yield from quantize_by(recipes, original, selection, make_importance_lookup(original, means))
