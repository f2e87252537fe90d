"""Caches of weights being quantized: their scales, measured once for all recipes by all threads, and their codes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Protocol

from quanterr.errors import CheckpointError
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Piece, Recipe, Rows, Source
from quanterr.util.text import display

MOST_KEPT = 4  # most weights whose scales are cached
CODE_BYTES = 1 << 24  # most bytes of codes that are cached
SAMPLE_BYTES = 1 << 20  # the same for sampled rows of large weights: more would fragment the heap


class QuantizedWeight(Protocol):
    """A weight that a recipe quantizes while it is read."""

    weight: str
    recipe: Recipe
    source: Source
    rows: Rows
    stretch: float
    importance: Tensor | None

    @property
    def kind(self) -> tuple[str, int]:
        """A key that weights share if they are read in the same pieces."""

    def pieces(self, first: int, stop: int) -> Iterable[tuple[int, int]]:
        """Yield the spans of rows in which the weight is read."""


class _MeasuredPieces:
    """Measured numbers of a weight's pieces in one tensor: many small tensors would fragment the heap."""

    def __init__(self, pieces: int) -> None:
        self._pieces, self._lock = pieces, threading.Lock()
        self._all: Tensor | None = None  # with room for all pieces; the last may have fewer rows
        self._last: Tensor | None = None

    def add(self, number: int, measured: Tensor) -> None:
        if number == self._pieces - 1:
            self._last = measured
            return
        n = len(measured)
        with self._lock:
            if self._all is None:
                self._all = torch.empty((self._pieces * n, *measured.shape[1:]), dtype=measured.dtype)
        self._all[number * n : (number + 1) * n] = measured

    def join(self) -> Tensor:
        assert self._last is not None  # noqa: S101 - all pieces have been added
        if self._all is None:
            return self._last
        first = len(self._all) // self._pieces * (self._pieces - 1)
        whole = self._all[: first + len(self._last)]
        whole[first:] = self._last
        return whole


class _WeightScales:
    """All tensors that recipes store for a weight except its codes: measured once, by all threads that need them."""

    def __init__(self, files: Sequence[QuantizedWeight]) -> None:
        """Prepare ``files`` of one weight that are read in the same pieces."""
        self._files, self._lock = files, threading.Lock()
        self._rows, self._pieces = files[0].rows, list(files[0].pieces(0, files[0].source.rows))
        self._found = {file: _MeasuredPieces(len(self._pieces)) for file in files}
        self._next, self._missing, self._ended = 0, len(self._pieces), threading.Event()
        self._settled: dict[QuantizedWeight, tuple[Tensor, ...]] = {}
        self._settling = threading.Lock()
        self._error: BaseException | None = None

    def get(self, file: QuantizedWeight) -> tuple[Tensor, ...]:
        """Return the settled tensors of one recipe; if they are not all measured yet, help the other threads first."""
        try:
            while (number := self._claim()) is not None:
                self._measure(number)
        except BaseException as error:
            self._error = error
            self._ended.set()  # release the waiting threads
            raise
        self._ended.wait()
        if self._error is not None:
            raise self._error
        with self._settling:
            if file not in self._settled:
                self._settled[file] = self._settle(file)
                del self._found[file]  # only now: if settling fails, every caller must get the error
        return self._settled[file]

    def _claim(self) -> int | None:
        with self._lock:
            if self._next == len(self._pieces):
                return None
            self._next += 1
            return self._next - 1

    def _measure(self, number: int) -> None:
        piece = Piece(self._rows(*self._pieces[number]))
        for file in self._files:
            self._found[file].add(number, file.recipe.encoder.measure(piece, file.importance))
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self._ended.set()

    def _settle(self, file: QuantizedWeight) -> tuple[Tensor, ...]:
        measured = self._found[file].join()
        low, high = torch.aminmax(measured)  # either is NaN if any number is
        if not isfinite(float(low)) or not isfinite(float(high)):
            raise CheckpointError(
                f"{display(file.weight)}: holds NaN or infinity, which no recipe quantizes; leave its tensor out"
            )
        if file.stretch != 1:
            measured = measured * file.stretch
        return file.recipe.encoder.settle(measured, file.source)


class CodeCache:
    """A cache of the latest codes, as a comparison reads a weight and then samples its rows, some several times."""

    def __init__(self, most: int) -> None:
        """Start empty; ``most`` limits the bytes that are cached."""
        self._most = most
        self._pieces: OrderedDict[tuple[QuantizedWeight, tuple[int, int]], Tensor] = OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def get(self, file: QuantizedWeight, rows: tuple[int, int], make: Callable[[], Tensor]) -> Tensor:
        """Return the codes, uint8, of rows (first, stop); make them if they are not cached."""
        key = file, rows
        with self._lock:
            if key in self._pieces:
                self._pieces.move_to_end(key)
                return self._pieces[key]
        codes = make()
        with self._lock:
            if key not in self._pieces:  # another thread may have added them meanwhile
                self._pieces[key] = codes
                self._bytes += codes.nbytes
            while self._bytes > self._most:
                self._bytes -= self._pieces.popitem(last=False)[1].nbytes
        return codes


class ScaleCache:
    """A cache of the scales, for all recipes, and codes of the weights that are being read."""

    def __init__(self) -> None:
        """Start empty."""
        self.codes, self.samples = CodeCache(CODE_BYTES), CodeCache(SAMPLE_BYTES)
        self._files: dict[tuple[str, int], list[QuantizedWeight]] = {}
        self._scales: OrderedDict[tuple[str, int], _WeightScales] = OrderedDict()
        self._lock = threading.Lock()

    def register(self, file: QuantizedWeight) -> None:
        """Add a recipe's file; files that are read in the same pieces are measured together."""
        self._files.setdefault(file.kind, []).append(file)

    def get(self, file: QuantizedWeight) -> tuple[Tensor, ...]:
        """Return the settled tensors of a weight; forget the weight used longest ago if there are too many."""
        with self._lock:
            found = self._scales.pop(file.kind, None) or _WeightScales(self._files[file.kind])
            self._scales[file.kind] = found
            if len(self._scales) > MOST_KEPT:
                self._scales.popitem(last=False)
        return found.get(file)
