"""Scales of the weights that are being quantized: measured once for all recipes, by all threads that need them."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quanterr.errors import CheckpointError
from quanterr.recipes.base import Recipe, Rows, Source
from quanterr.util.text import display

MOST_KEPT = 4  # weights whose scales are kept


class Quantized(Protocol):
    """A weight that a recipe quantizes while it is read."""

    weight: str
    recipe: Recipe
    source: Source
    rows: Rows
    stretch: float
    importance: Tensor | None

    @property
    def kind(self) -> tuple[str, int]:
        """The same of those that are read in the same pieces."""

    def pieces(self, first: int, stop: int) -> Iterable[tuple[int, int]]:
        """The spans of rows in which it is read."""


class _Measured:
    """What the pieces of a weight give, one behind the other: many small tensors would tear the heap to pieces."""

    def __init__(self, pieces: int) -> None:
        self._pieces, self._lock = pieces, threading.Lock()
        self._all: Tensor | None = None  # but of the last piece, which may have fewer rows
        self._last: Tensor | None = None

    def add(self, number: int, measured: Tensor) -> None:
        if number == self._pieces - 1:
            self._last = measured
            return
        n = len(measured)
        with self._lock:
            if self._all is None:
                self._all = torch.empty(((self._pieces - 1) * n, *measured.shape[1:]), dtype=measured.dtype)
        self._all[number * n : (number + 1) * n] = measured

    def whole(self) -> Tensor:
        return torch.cat([part for part in (self._all, self._last) if part is not None])


class _Scales:
    """All that recipes store of a weight but its codes: measured once, by all threads that need it together."""

    def __init__(self, files: Sequence[Quantized]) -> None:
        """``files`` are of one weight and are read in the same pieces."""
        self._files, self._lock = {id(file): file for file in files}, threading.Lock()
        self._rows, self._pieces = files[0].rows, list(files[0].pieces(0, files[0].source.rows))
        self._found = {key: _Measured(len(self._pieces)) for key in self._files}
        self._next, self._missing, self._ended = 0, len(self._pieces), threading.Event()
        self._settled: dict[int, tuple[Tensor, ...]] = {}
        self._settling = threading.Lock()
        self._error: BaseException | None = None

    def get(self, file: Quantized) -> tuple[Tensor, ...]:
        """Of one of the recipes, settled; helps to measure where others are still at it."""
        try:
            while (number := self._claimed()) is not None:
                self._measure(number)
        except BaseException as error:
            self._error = error
            self._ended.set()  # nobody may wait for what will not come
            raise
        self._ended.wait()
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
        with self._settling:
            if id(file) not in self._settled:
                self._settled[id(file)] = self._settle(file)
                del self._found[id(file)]  # not before: who asks for what cannot be settled is told so each time
        return self._settled[id(file)]

    def _claimed(self) -> int | None:
        with self._lock:
            if self._next == len(self._pieces):
                return None
            self._next += 1
            return self._next - 1

    def _measure(self, number: int) -> None:
        x = self._rows(*self._pieces[number])
        for key, file in self._files.items():
            self._found[key].add(number, file.recipe.scheme.measure(x, file.importance))
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self._ended.set()

    def _settle(self, file: Quantized) -> tuple[Tensor, ...]:
        measured = self._found[id(file)].whole()
        if not bool(measured.isfinite().all()):
            raise CheckpointError(
                f"{display(file.weight)}: holds NaN or infinity, which no recipe quantizes; -l '!{file.weight}' "
                "leaves it out"
            )
        if file.stretch != 1:
            measured = measured * file.stretch
        return file.recipe.scheme.settle(measured, file.source)


class KeptScales:
    """The scales of the few weights that are being read, of all recipes."""

    def __init__(self) -> None:
        """Start with none."""
        self._files: dict[tuple[str, int], list[Quantized]] = {}
        self._scales: OrderedDict[tuple[str, int], _Scales] = OrderedDict()
        self._lock = threading.Lock()

    def register(self, file: Quantized) -> None:
        """A weight by a recipe; those that are read in the same pieces are measured together."""
        self._files.setdefault(file.kind, []).append(file)

    def of(self, file: Quantized) -> tuple[Tensor, ...]:
        """Those of a weight; the oldest of others are forgotten."""
        with self._lock:
            found = self._scales.pop(file.kind, None) or _Scales(self._files[file.kind])
            self._scales[file.kind] = found
            if len(self._scales) > MOST_KEPT:
                self._scales.popitem(last=False)
        return found.get(file)
