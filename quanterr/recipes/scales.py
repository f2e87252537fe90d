"""Caches for weights that are being quantized: scales, which threads measure once for all recipes, and codes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Protocol

from quanterr.errors import CheckpointError
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Piece, Recipe, Rows, Source
from quanterr.util.text import display

MAX_KEPT_WEIGHTS = 4  # maximum number of weights whose scales are cached
MAX_CODE_BYTES = 1 << 24  # maximum size of cached codes
MAX_SAMPLE_BYTES = 1 << 20  # as MAX_CODE_BYTES, for sampled rows of large weights: larger tensors fragment the heap


class QuantizedWeight(Protocol):
    """A weight that a recipe quantizes while it is read."""

    weight: str
    recipe: Recipe
    source: Source
    rows: Rows
    stretch: float
    importance: Tensor | None

    @property
    def shared_key(self) -> tuple[str, int]:
        """A key that weights share if they are read in the same pieces."""

    def pieces(self, first: int, stop: int) -> Iterable[tuple[int, int]]:
        """Yield the spans of rows in which the weight is read."""


class _MeasuredPieces:
    """The measured numbers of a weight's pieces, in one tensor because many small ones would fragment the heap."""

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
    """All tensors except codes that recipes store for a weight; threads that need them share the measuring."""

    def __init__(self, files: Sequence[QuantizedWeight]) -> None:
        """Take the files of one weight that are read in the same pieces, one for each recipe."""
        self._files, self._lock = files, threading.Lock()
        self._rows, self._pieces = files[0].rows, list(files[0].pieces(0, files[0].source.rows))
        self._measured = {file: _MeasuredPieces(len(self._pieces)) for file in files}
        self._next, self._missing, self._ended = 0, len(self._pieces), threading.Event()
        self._settled: dict[QuantizedWeight, tuple[Tensor, ...]] = {}
        self._settling = threading.Lock()
        self._error: BaseException | None = None

    def get(self, file: QuantizedWeight) -> tuple[Tensor, ...]:
        """Return the settled tensors of one recipe; first help other threads to measure the remaining pieces."""
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
                # Deleted only now: if settling fails, the next caller tries again and gets the error, too.
                del self._measured[file]
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
            self._measured[file].add(number, file.recipe.encoder.measure(piece, file.importance))
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self._ended.set()

    def _settle(self, file: QuantizedWeight) -> tuple[Tensor, ...]:
        measured = self._measured[file].join()
        low, high = torch.aminmax(measured)  # either is NaN if any number is
        if not isfinite(float(low)) or not isfinite(float(high)):
            raise CheckpointError(
                f"{display(file.weight)}: holds NaN or infinity, which no recipe quantizes; leave its tensor out"
            )
        if file.stretch != 1:
            measured = measured * file.stretch
        return file.recipe.encoder.settle(measured, file.source)


class CodeCache:
    """A cache of the latest codes, because a comparison reads a weight and then samples some of its rows repeatedly."""

    def __init__(self, limit: int) -> None:
        """Start empty; ``limit`` is the maximum number of bytes that are cached."""
        self._limit = limit
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
            while self._bytes > self._limit:
                self._bytes -= self._pieces.popitem(last=False)[1].nbytes
        return codes


class ScaleCache:
    """A cache, shared by all recipes, of scales and codes of the weights that are being read."""

    def __init__(self) -> None:
        """Start empty."""
        self.codes, self.samples = CodeCache(MAX_CODE_BYTES), CodeCache(MAX_SAMPLE_BYTES)
        self._files: dict[tuple[str, int], list[QuantizedWeight]] = {}
        self._scales: OrderedDict[tuple[str, int], _WeightScales] = OrderedDict()
        self._lock = threading.Lock()

    def register(self, file: QuantizedWeight) -> None:
        """Add a recipe's file; files that are read in the same pieces are measured together."""
        self._files.setdefault(file.shared_key, []).append(file)

    def get(self, file: QuantizedWeight) -> tuple[Tensor, ...]:
        """Return the settled tensors of a weight; if too many weights are cached, drop the one used longest ago."""
        with self._lock:
            scales = self._scales.pop(file.shared_key, None) or _WeightScales(self._files[file.shared_key])
            self._scales[file.shared_key] = scales
            if len(self._scales) > MAX_KEPT_WEIGHTS:
                self._scales.popitem(last=False)
        return scales.get(file)
