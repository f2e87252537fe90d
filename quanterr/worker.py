"""One worker: its buffers, and what it does with chunks of a pair."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf, isfinite
from typing import NamedTuple

import torch

from quanterr.chunks import Chunk
from quanterr.formats import Weight
from quanterr.formats.scaled import chunks_of_scale
from quanterr.kernel import exact_sums, fast_sums
from quanterr.metrics.sums import Sums, exact
from quanterr.pairing import Pair
from quanterr.tensors import Workspace

MOST_KEPT = 1 << 14  # elements of a pair whose values are kept: to read its worst row again would cost more


class Scales(NamedTuple):
    """Statistics of a weight's scales; sums in units of 2^-1074."""

    number: int
    nonfinite: int
    zero: int
    negative: int
    total: int
    low: float
    high: float

    @classmethod
    def of(cls, pieces: Iterable[torch.Tensor]) -> "Scales":
        """Statistics of scales, float32, given a piece at a time."""
        number = nonfinite = zero = negative = total = 0
        low, high = inf, -inf
        for piece in pieces:
            number += piece.numel()
            if piece.numel() == 1 and isfinite(value := float(piece)):  # most often
                zero, negative = zero + (value == 0), negative + (value < 0)
                total, low, high = total + exact(value), min(low, value), max(high, value)
                continue
            finite = piece[piece.isfinite()].double()
            nonfinite += piece.numel() - finite.numel()
            if finite.numel():
                lowest, highest = (float(bound) for bound in torch.aminmax(finite))
                low, high = min(low, lowest), max(high, highest)
                total += exact(float(finite.sum()))
                if lowest <= 0:
                    zero, negative = zero + int((finite == 0).sum()), negative + int((finite < 0).sum())
        return cls(number, nonfinite, zero, negative, total, low, high)


class Element(NamedTuple):
    """The element of a weight with the largest error."""

    row: int
    col: int
    x: float
    y: float


class Finished(NamedTuple):
    """A compared pair."""

    number: int
    sums: Sums
    scales: Scales | None
    worst: Element | None


class _Kept(NamedTuple):
    """Values of a small pair, (r, c) each, that the kernel cannot overwrite."""

    pair: Pair
    x: torch.Tensor
    y: torch.Tensor


class Worker:
    """One thread's buffers, and what it does with them."""

    def __init__(self, device: torch.device, size: int, outlier: float) -> None:
        """Start without any buffer; ``size`` is that of the chunks."""
        self.device, self.size, self.outlier = device, size, outlier
        self._original, self._quantized, self._kernel = (Workspace(device) for _ in range(3))
        self._kept: _Kept | None = None

    def stream(self) -> AbstractContextManager[object]:
        """Its own CUDA stream as a context; on the CPU nothing."""
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        return self._original.nbytes + self._quantized.nbytes + self._kernel.nbytes

    def compare(self, pair: Pair, chunks: Sequence[Chunk]) -> Sums:
        """Sums of a few chunks of a pair."""
        saturated: list[torch.Tensor] = []

        def load(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            x = pair.original.dequantize(chunk, self._original).weight
            y, at_end, zeros = pair.quantized.dequantize(chunk, self._quantized)
            if at_end is not None:
                saturated.append(at_end)
            if len(chunks) == 1 and chunk.n <= MOST_KEPT:
                buffers = (self._kernel.buffer(key, chunk.shape, v.dtype) for key, v in (("kept_x", x), ("kept_y", y)))
                self._kept = _Kept(pair, *(buffer.copy_(v) for buffer, v in zip(buffers, (x, y), strict=True)))
            return x, y, zeros

        if not chunks:
            return Sums()
        cols, sums = pair.original.matrix[1], None
        if not pair.original.wide and not pair.quantized.wide:
            sums = fast_sums(load, chunks, cols, self._kernel, self.outlier, pair.importance)
        if sums is None:
            saturated.clear()
            sums = exact_sums(load, chunks, cols, self.outlier, pair.importance)
        if saturated:
            sums.saturated = int(torch.stack(saturated).sum())
        return sums

    def finish(self, number: int, pair: Pair, sums: Sums) -> Finished:
        """What is told of a weight besides its sums."""
        return Finished(number, sums, self._scales(pair.quantized), self._worst(pair, sums))

    def _worst(self, pair: Pair, sums: Sums) -> Element | None:
        """From the row with the largest |e|, read again if need be: its place costs more to remember."""
        if sums.worst is None:
            return None
        _, row, col = sums.worst
        if self._kept is not None and self._kept.pair is pair:
            x, y = self._kept.x[row].double(), self._kept.y[row].double()
        else:
            chunk = Chunk(row, row + 1, col, min(col + self.size, pair.original.matrix[1]))
            x = pair.original.dequantize(chunk, self._original).weight[0].double()
            y = pair.quantized.dequantize(chunk, self._quantized).weight[0].double()
        at = int((y - x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().argmax())
        return Element(row, col + at, float(x[at]), float(y[at]))

    def _scales(self, weight: Weight) -> Scales | None:
        if weight.scale is None:
            return None
        return Scales.of(chunks_of_scale(weight.scale, self._quantized))
