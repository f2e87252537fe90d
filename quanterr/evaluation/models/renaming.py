"""The original under a candidate's names, if these differ, such as those of a diffusers folder and a file of ComfyUI.

Both store rows of the same parameters (layouts.py), so every tensor of the candidate consists of rows of the original's
tensors. Under the candidate's names, these rows are a checkpoint that pairs with the candidate by names, whatever the
format of the candidate.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from quanterr.checkpoints import Checkpoint
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.evaluation.models.layouts import Layout, Rows, Shape, denoiser_names, find_layout
from quanterr.evaluation.models.rows import RowsFile
from quanterr.evaluation.models.weights import OriginalWeights
from quanterr.pairing.side import CheckpointSide
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, itemize


class Counterpart(NamedTuple):
    """The original under a candidate's names, and the tensors of either side that the model does not need."""

    originals: OriginalWeights
    ignored: frozenset[str] = frozenset()


def counterpart(
    model: nn.Module, config: JsonObject, originals: OriginalWeights, layout: Layout, candidate: Checkpoint
) -> Counterpart:
    """Return the original, which has the given layout, under the names of a candidate; unchanged if they are equal.

    Raises:
        CheckpointError: the candidate's names belong to another model, or either side lacks tensors.
    """
    side = CheckpointSide("quantized", candidate)
    side.attach_siblings()
    shapes = {name: _find_shape(side, name) for name in side.codes}  # after dequantization
    bare, _ = denoiser_names(shapes)
    others = frozenset(shapes) - frozenset(bare.values())
    wanted = {rows.source.removeprefix(layout.prefix) for pieces in layout.parameters.values() for rows in pieces}
    same = Counterpart(originals, layout.ignored | others)
    if wanted <= bare.keys():
        return same
    where = display(candidate.path)
    try:
        candidate_layout = find_layout(model, config, shapes, where, has_lost_ones=candidate.gguf is not None)
    except CheckpointError:
        if 2 * len(wanted & bare.keys()) > len(wanted):  # the original's names, of which some are missing
            return same
        raise
    if candidate_layout.has_names_of(layout):
        return same
    if missing := [name for name in layout.parameters if name not in candidate_layout.parameters]:
        raise CheckpointError(f"{where}: nothing in it makes up {itemize(missing, 3)} of {type(model).__name__}")
    if lacking := [name for name in candidate_layout.parameters if name not in layout.parameters]:
        raise CheckpointError(
            f"{display(originals.checkpoint.path)}: lacks {itemize(lacking, 3)}, which the config's model has"
        )
    return Counterpart(_rename(originals, layout, candidate_layout), layout.ignored | candidate_layout.ignored)


def _find_shape(side: CheckpointSide, name: str) -> Shape:
    try:
        return side.recognize(name).shape
    except FormatMismatch:  # pairing reports why
        return side.codes[name].shape


def _rename(originals: OriginalWeights, layout: Layout, candidate_layout: Layout) -> OriginalWeights:
    """Return the original, divided into the tensors of the candidate's layout.

    Shapes come from the original's rows: a candidate may store padding, or omit leading dimensions of 1.
    """
    pieces: dict[str, list[tuple[int, Rows]]] = {}  # candidate's tensor → (first row in it, rows of the original)
    for name, parts in candidate_layout.parameters.items():
        first = 0
        for part in parts:
            at = part.first
            for rows in _cut(layout.parameters[name], first, part.n):
                pieces.setdefault(part.source, []).append((at, rows))
                at += rows.n
            first += part.n
    entries = {}
    for name, rows_by_place in pieces.items():
        ordered = sorted(rows_by_place)
        weights = [(originals.weights[rows.source], rows) for _, rows in ordered]
        of_first = weights[0][0].shape
        shape = (sum(rows.n for _, rows in ordered), *of_first[1:]) if of_first else ()
        ends = [0, *(first + rows.n for first, rows in ordered)]
        if [first for first, _ in ordered] == ends[:-1]:  # no gap, so every row belongs to a parameter
            entries[name] = RowsFile(name, shape, weights).entry
    original = originals.checkpoint
    virtual = Checkpoint(original.path, original.kind, (), entries, config=original.config, folder=original.folder)
    renamed = OriginalWeights(virtual, originals.device)
    renamed.layout = candidate_layout
    return renamed


def _cut(pieces: Sequence[Rows], first: int, n: int) -> Iterator[Rows]:
    """Yield rows ``first`` to ``first + n`` of a parameter, as rows of stored tensors."""
    for rows in pieces:
        low, high = max(first, 0), min(first + n, rows.n)
        if low < high:
            yield Rows(rows.source, rows.first + low, high - low)
        first -= rows.n
