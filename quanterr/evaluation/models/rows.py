"""Tensors that consist of rows of other weights, read on demand, by which an original gets other names."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from quanterr.checkpoints import CheckpointFile, Entry
from quanterr.checkpoints.base import DTYPE_BITS
from quanterr.evaluation.models.layouts import Rows, Shape
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.pairing.views import is_plain
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import display

DEQUANTIZED_DTYPE = "F32"  # dtype of rows whose weight is quantized


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
        # Number of matrix rows for each index of the first axis: several in a stack, none in a vector.
        each = rows // self._weight.shape[0]
        chunk = Chunk(first * each, stop * each, 0, cols) if len(self._weight.shape) > 1 else Chunk(0, 1, first, stop)
        with torch.inference_mode():
            return Reader().read(self._weight, chunk)


class RowsFile(CheckpointFile):
    """A tensor made of rows of the original's weights, which it reads on demand."""

    def __init__(self, name: str, shape: Shape, parts: Sequence[tuple[Weight, Rows]]) -> None:
        """Join ``parts``, rows of weights from top to bottom."""
        self.sources = {entry.name for weight, _ in parts for entry in weight.coded or (weight.codes,)}
        alone = parts[0][0] if len(parts) == 1 else None
        self.whole = (
            alone if alone is not None and alone.shape == shape else None
        )  # the weight to which all the rows belong
        dtypes = {weight.codes.dtype if is_plain(weight) else DEQUANTIZED_DTYPE for weight, _ in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else DEQUANTIZED_DTYPE
        is_stored = all(is_plain(weight) and weight.codes.dtype == dtype for weight, _ in parts)
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

    def will_need(self, offset: int, n: int) -> None:
        """Do nothing, as the original's files are read row by row."""

    def check_unchanged(self) -> None:
        """Do nothing, as the original's files are checked."""

    def close(self) -> None:
        """Do nothing, as the original's files are closed."""
