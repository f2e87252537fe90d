"""Rows of both sides of a pair, which are kept during the pass over the weight, or read again afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from quanterr.formats import Weight
from quanterr.kernel.decoding import read_into, read_values
from quanterr.kernel.levels import Scaling
from quanterr.kernel.library import Kernel
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.samples.rows import count_rows, list_rows
from quanterr.samples.small_weights import SmallWeights
from quanterr.tensors.chunks import Chunk, split_chunks
from quanterr.tensors.workspace import FilledWorkspace, Workspace

MAX_SPANNED_ELEMENTS = 1 << 21  # maximum size of a span of rows whose scales are read at once


class Group(NamedTuple):
    """The rows of chunks of the same columns, (r, c) float32 each, and their scaling if there is one."""

    chunks: list[Chunk]
    x: Tensor
    y: Tensor
    scales: Scaling | None


class KeptSample(NamedTuple):
    """The sampled rows of a pair that the kernel has kept, (2, n, c) float32, and the first row of each chunk."""

    pair: Pair
    first_rows: dict[Chunk, int]
    values: Tensor


class Buffers:
    """The buffers of one thread."""

    def __init__(self, device: torch.device, size: int, candidates: int, kernel: Kernel | None) -> None:
        """Start empty, for chunks of ``size`` elements; ``kernel`` decodes for the CPU, if there is one."""
        self.device, self.size, self.kernel = device, size, kernel if device.type == "cpu" else None
        # Workspaces of the quantized side may keep parts from one range to the next; small weights are read ahead.
        self.original, self.computed, self.copies, x, y, *each = (Workspace(device) for _ in range(5 + candidates))
        self.ahead, self.quantized = (x, y), each
        self.small = SmallWeights(self.computed)
        self.kept_samples: dict[int, KeptSample] = {}  # by the pair's index in its task

    @cached_property
    def ends(self) -> tuple[FilledWorkspace, FilledWorkspace]:
        """The buffers of weights filled with the lowest codes, and with the highest."""
        return FilledWorkspace(self.device), FilledWorkspace(self.device)

    @cached_property
    def smallest(self) -> FilledWorkspace:
        """The buffers of weights with the smallest scales that can be stored."""
        return FilledWorkspace(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        workspaces = self.original, self.computed, self.copies, *self.ahead, *self.quantized, *self.ends, self.smallest
        return sum(each.nbytes for each in workspaces)


class PairReader:
    """Reads rows of one pair; ``place`` is its index in its task."""

    def __init__(self, buffers: Buffers, pair: Pair, place: int) -> None:
        """Read ``pair`` into the thread's ``buffers``."""
        self.buffers, self.pair, self.quantized = buffers, pair, buffers.quantized[place]
        self._coded = pair.quantized.unrotated  # has one code for each element
        kept = buffers.kept_samples.get(place)
        self._kept = kept if kept is not None and kept.pair is pair else None

    def read_values(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return both sides of a chunk, (r, c) float32, or float64 if needed; kept values are used if there are any."""
        kept, pair = self.buffers.small.values(self.pair), self.pair
        if kept is not None and chunk.n == pair.original.n:
            return kept[0].float(), kept[1].float()
        if pair.original.needs_float64 or pair.quantized.needs_float64:
            x = pair.original.dequantize(chunk, self.buffers.original).weight
            return x, pair.quantized.dequantize(chunk, self.quantized).weight
        x, y = (self.buffers.computed.buffer(f"values_{side}", chunk.shape, torch.float32) for side in "xy")
        return self._read("x", chunk, x), self._read("y", chunk, y)

    def read_group(self, chunks: Sequence[Chunk]) -> Group:
        """Read both sides and the scaling of chunks of the same columns; valid until the next group is read.

        If columns are rotated, those of the original are rotated, too.
        """
        rotated, (x, y) = self.pair.quantized.rotated, self._read_sample(chunks)
        if rotated:
            x = rotated.rotate(x.clone(), self.buffers.computed)
            y = torch.cat([rotated.weight.dequantize(chunk, self.quantized).weight.clone() for chunk in chunks])
        return Group(list(chunks), x, y, self._read_scaling(self._coded, chunks))

    def read_block(self, chunk: Chunk) -> Tensor:
        """Return the original's values of a chunk that is read by whole rows, (r, c) float32."""
        x = self.buffers.computed.buffer("values_x", chunk.shape, torch.float32)
        for rows in split_chunks([chunk._replace(col=0, stop_col=self.pair.original.matrix[1])], self.buffers.size):
            whole = self.buffers.computed.buffer("whole_rows", rows.shape, torch.float32)
            self._read("x", rows, whole)
            x[rows.row - chunk.row : rows.stop_row - chunk.row] = whole[:, chunk.col : chunk.stop_col]
        return x

    def _read_sample(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Return both sides of chunks of the same columns, concatenated by rows, (r, c) float32.

        Float64 values are rounded to float32, which is finer than the steps of any format.
        """
        kept = self._kept
        if kept is not None and chunks[0] in kept.first_rows:
            first = kept.first_rows[chunks[0]]
            x, y = kept.values[:, first : first + count_rows(chunks)]
            return x, y
        if len(chunks) == 1:
            x, y = self.read_values(chunks[0])
            return x.float(), y.float()
        return self._stack("x", chunks), self._stack("y", chunks)

    def _stack(self, side: str, chunks: Sequence[Chunk]) -> Tensor:
        shape, row = (count_rows(chunks), chunks[0].shape[1]), 0
        values = self.buffers.computed.buffer(f"sample_{side}", shape, torch.float32)
        for chunk in chunks:
            self._read(side, chunk, values[row : row + chunk.shape[0]])
            row += chunk.shape[0]
        return values

    def _read_scaling(self, weight: Weight, chunks: Sequence[Chunk]) -> Scaling | None:
        """Return the scaling of chunks, concatenated; None if the weight has none."""
        span = chunks[0]._replace(stop_row=chunks[-1].stop_row)
        if len(chunks) == 1 or span.n <= MAX_SPANNED_ELEMENTS:
            rows = None if len(chunks) == 1 else torch.tensor(list_rows(chunks), device=self.buffers.device) - span.row
            units = weight.units(span, self.quantized, rows)
            if units is not None:
                return Scaling(units.clone())
        decode_values = partial(read_values, self.buffers.kernel, weight)
        if len(chunks) == 1:
            return weight.scaling(span, self.buffers.ends, decode_values)
        return _stack_scalings((weight.scaling(chunk, self.buffers.ends, decode_values) for chunk in chunks), chunks)

    def _read(self, side: str, chunk: Chunk, out: Tensor) -> Tensor:
        """Read one side of a chunk of whole rows, or of a piece of a row, into ``out``, (r, c) float32."""
        weight, workspace = (
            (self.pair.original, self.buffers.original) if side == "x" else (self.pair.quantized, self.quantized)
        )
        return read_into(out, self.buffers.kernel, weight, chunk, workspace)


def _stack_scalings(scalings: Iterable[Scaling | None], chunks: Sequence[Chunk]) -> Scaling | None:
    """Copy the scalings of chunks, which share buffers, as one for all rows; None if a chunk has none."""
    scales = [
        Scaling(scaling.unit.clone(), None if scaling.shift is None else scaling.shift.clone())
        for scaling in scalings
        if scaling
    ]
    if len(scales) < len(chunks):
        return None
    if scales[0].unit.numel() == 1:
        return scales[0]
    units = [scaling.unit.expand(chunk.shape[0], -1) for scaling, chunk in zip(scales, chunks, strict=True)]
    shifts = [scaling.shift for scaling in scales if scaling.shift is not None]
    return Scaling(torch.cat(units), torch.cat(shifts) if shifts else None)
