"""The original in a candidate's names, if these differ, such as a diffusers folder beside a file of ComfyUI.

Both store the rows of the same parameters (layouts.py). So every tensor of the candidate consists of rows of the
original's tensors. Under the candidate's names, these rows make up a checkpoint that pairs with the candidate name by
name, whatever the format of the candidate.
"""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import nn

from quanterr.checkpoints import Checkpoint, CheckpointFile, Entry
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.evaluation.models.layouts import Layout, Rows, Shape, denoiser_names, find_layout
from quanterr.evaluation.models.sides import Sides
from quanterr.formats import Weight
from quanterr.pairing.side import CheckpointSide
from quanterr.pairing.views import is_view
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.devices import CPU
from quanterr.tensors.workspace import Workspace
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, listed

DEQUANTIZED = "F32"  # dtype of rows whose weight is quantized


class Counterpart(NamedTuple):
    """The original in a candidate's names, and the tensors of either side that the model does not need."""

    sides: Sides
    ignored: frozenset[str] = frozenset()


def counterpart(
    model: nn.Module, config: JsonObject, sides: Sides, layout: Layout, candidate: Checkpoint
) -> Counterpart:
    """Return the original, which has the given layout, in the names of a candidate; itself if they are its own.

    Raises:
        CheckpointError: the candidate's names belong to another model, or either side lacks tensors.
    """
    shapes = _shapes(candidate)
    bare, _ = denoiser_names(shapes)
    others = frozenset(shapes) - frozenset(bare.values())
    wanted = {rows.source.removeprefix(layout.prefix) for pieces in layout.parameters.values() for rows in pieces}
    same = Counterpart(sides, layout.ignored | others)
    if wanted <= bare.keys():
        return same
    where = display(candidate.path)
    try:
        own = find_layout(model, config, shapes, where, has_lost_ones=candidate.gguf is not None)
    except CheckpointError:
        if 2 * len(wanted & bare.keys()) > len(wanted):  # the original's names, some of which are missing
            return same
        raise
    if own.has_names_of(layout):
        return same
    if missing := [name for name in layout.parameters if name not in own.parameters]:
        raise CheckpointError(f"{where}: nothing in it makes up {listed(missing, 3)} of {type(model).__name__}")
    if lacking := [name for name in own.parameters if name not in layout.parameters]:
        raise CheckpointError(
            f"{display(sides.checkpoint.path)}: lacks {listed(lacking, 3)}, which the config's model has"
        )
    return Counterpart(_rename(sides, layout, own), layout.ignored | own.ignored)


def _shapes(candidate: Checkpoint) -> dict[str, Shape]:
    """Return the shapes of a candidate's weights after dequantization."""
    side = CheckpointSide("quantized", candidate)
    side.attach_siblings()
    return {name: _shape(side, name) for name in side.codes}


def _shape(side: CheckpointSide, name: str) -> Shape:
    try:
        return side.recognize(name).shape
    except FormatMismatch:  # pairing says why
        return side.codes[name].shape


def _rename(sides: Sides, layout: Layout, own: Layout) -> Sides:
    """Return the original, divided into the tensors of the candidate's layout.

    Shapes come from the original's rows: a candidate may store padding, or omit leading dimensions of 1.
    """
    pieces: dict[str, list[tuple[int, Rows]]] = {}  # candidate's tensor → (first row in it, rows of the original)
    for name, parts in own.parameters.items():
        first = 0
        for part in parts:
            at = part.first
            for rows in _cut(layout.parameters[name], first, part.n):
                pieces.setdefault(part.source, []).append((at, rows))
                at += rows.n
            first += part.n
    entries = {}
    for name, found in pieces.items():
        ordered = sorted(found)
        weights = [(sides.weights[rows.source], rows) for _, rows in ordered]
        of_first = weights[0][0].shape
        shape = (sum(rows.n for _, rows in ordered), *of_first[1:]) if of_first else ()
        ends = [0, *(first + rows.n for first, rows in ordered)]
        if [first for first, _ in ordered] == ends[:-1]:  # without a gap: every row belongs to a parameter
            entries[name] = RowsFile(name, shape, weights).entry
    original = sides.checkpoint
    virtual = Checkpoint(original.path, original.kind, (), entries, config=original.config, folder=original.folder)
    renamed = Sides(virtual, sides.device)
    renamed.layout = own
    return renamed


def _cut(pieces: Sequence[Rows], first: int, n: int) -> Iterator[Rows]:
    """Yield rows ``first`` to ``first + n`` of a parameter, as rows of stored tensors."""
    for rows in pieces:
        low, high = max(first, 0), min(first + n, rows.n)
        if low < high:
            yield Rows(rows.source, rows.first + low, high - low)
        first -= rows.n


class _Readable(Protocol):
    """Bytes of consecutive rows."""

    nbytes: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""


class _StoredRows:
    """Rows of floats, as they are stored."""

    def __init__(self, entry: Entry, rows: Rows) -> None:
        row = entry.nbytes // max(entry.shape[0] if entry.shape else 1, 1)
        self._entry, self._begin, self.nbytes = entry, entry.offset + rows.first * row, rows.n * row

    def read_into(self, view: memoryview, offset: int) -> None:
        self._entry.file.read_into(view, self._begin + offset)


class _DequantizedRows:
    """Rows of a quantized weight, as float32."""

    def __init__(self, weight: Weight, rows: Rows) -> None:
        self._weight, self._rows = weight, rows
        self._row = 4 * prod(weight.shape[1:])  # bytes
        self.nbytes = rows.n * self._row

    def read_into(self, view: memoryview, offset: int) -> None:
        first, stop = offset // self._row, -(-(offset + len(view)) // self._row)
        values = self._dequantize(self._rows.first + first, self._rows.first + stop)
        begin = offset - first * self._row
        stored = values.float().contiguous().flatten().view(torch.uint8)[begin : begin + len(view)]
        torch.frombuffer(view, dtype=torch.uint8).copy_(stored)

    def _dequantize(self, first: int, stop: int) -> torch.Tensor:
        rows, cols = self._weight.matrix
        each = rows // self._weight.shape[0]  # matrix rows in a row of the weight: several in a stack, none in a vector
        chunk = Chunk(first * each, stop * each, 0, cols) if len(self._weight.shape) > 1 else Chunk(0, 1, first, stop)
        with torch.inference_mode():
            return self._weight.dequantize(chunk, Workspace(CPU)).weight


class RowsFile(CheckpointFile):
    """A tensor made of rows of the original's weights, which it reads on demand."""

    def __init__(self, name: str, shape: Shape, parts: Sequence[tuple[Weight, Rows]]) -> None:
        """Join ``parts``, rows of weights from top to bottom."""
        self.sources = {entry.name for weight, _ in parts for entry in weight.coded or (weight.codes,)}
        dtypes = {weight.codes.dtype if _is_plain(weight) else DEQUANTIZED for weight, _ in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else DEQUANTIZED
        is_stored = all(_is_plain(weight) and weight.codes.dtype == dtype for weight, _ in parts)
        self._parts: list[_Readable] = [
            _StoredRows(weight.codes, rows) if is_stored else _DequantizedRows(weight, rows) for weight, rows in parts
        ]
        self.path, self.size = Path(name), prod(shape) * DTYPE_BITS[dtype] // 8
        self.entry = Entry(name, dtype, shape, self, 0, self.size)

    def __str__(self) -> str:
        return f"the original's {display(str(self.path))}"

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        begin = 0
        for part in self._parts:
            low, high = max(offset, begin), min(offset + len(view), begin + part.nbytes)
            if low < high:
                part.read_into(view[low - offset : high - offset], low - begin)
            begin += part.nbytes

    @property
    def descriptor(self) -> int:
        """Always -1, as there is no file."""
        return -1

    def will_need(self, offset: int, n: int) -> None:
        """Do nothing: the original's files are read row by row."""

    def check_unchanged(self) -> None:
        """Do nothing: the original's files are checked."""

    def close(self) -> None:
        """Do nothing: the original's files are closed."""


def _is_plain(weight: Weight) -> bool:
    """Return whether a weight's values are its stored floats, in order."""
    is_moved = weight.computed or is_view(weight)
    return weight.encoding == "floats" and weight.codes.shape == weight.shape and not is_moved
