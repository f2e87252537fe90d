"""The reader of values and scales: it reads the few rows that checks need besides the pass over all values."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from quanterr.checkpoints import Entry
from quanterr.formats.base import Weight
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.kernel.decoding import measure_error, read_into
from quanterr.kernel.levels import Scaling
from quanterr.kernel.library import Kernel, choose_kernel
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import CPU_CHUNK, Chunk, Cut
from quanterr.tensors.workspace import FilledWorkspace, Workspace

FIRST_ROWS = 1 << 18  # default number of elements in a sample of first rows
Weights = tuple[Weight, Weight]  # the original's and the quantized one


class Reader:
    """Reads weights on the CPU, for one thread; it starts without buffers.

    The compiled kernel decodes what it can, to the bits of ``Weight.dequantize``. The caller may keep and change the
    tensors that a method returns, unless its docstring says otherwise. Every method raises CheckpointError if a file
    cannot be read.
    """

    @cached_property
    def sides(self) -> tuple[Workspace, Workspace]:
        """Buffers for two weights that are read in turn, whose parts they keep."""
        return Workspace(), Workspace()

    @cached_property
    def _workspaces(self) -> tuple[FilledWorkspace, FilledWorkspace, FilledWorkspace]:
        """Buffers for the lowest codes, for the highest, and for another part that is replaced."""
        return FilledWorkspace(), FilledWorkspace(), FilledWorkspace()

    @cached_property
    def _kernel(self) -> Kernel | None:
        return choose_kernel().kernel

    def read(self, weight: Weight, chunk: Chunk, side: int = 0) -> Tensor:
        """Return the values of a chunk, (r, c) float32, or float64 where float32 would round them."""
        out = torch.empty(chunk.shape, dtype=_find_dtype(weight))
        return read_into(out, self._kernel, weight, chunk, self.sides[side])

    def read_whole(self, weight: Weight, side: int = 0) -> Tensor:
        """Return all values of a weight, (rows, cols); chunk by chunk, so that no format needs room for all at once."""
        values = torch.empty(weight.matrix, dtype=_find_dtype(weight))
        for chunk in Cut(*weight.matrix, CPU_CHUNK):
            place = values[chunk.row : chunk.stop_row, chunk.col : chunk.stop_col]
            read_into(place, self._kernel, weight, chunk, self.sides[side])
        return values

    def read_both(self, weights: Weights, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the values of a chunk of two weights, as :meth:`read` does."""
        x, y = (self.read(weight, chunk, side) for side, weight in enumerate(weights))
        return x, y

    def read_first_rows(self, weight: Weight, elements: int = FIRST_ROWS) -> Tensor:
        """Return the first rows, at most ``elements`` elements, or a part of the first row, (r, c) float64."""
        rows, cols = weight.matrix
        if cols >= elements:
            return self.read(weight, Chunk(0, 1, 0, elements)).double()
        chunks = Cut(min(elements // max(cols, 1), rows), cols, CPU_CHUNK)
        return torch.cat([self.read(weight, chunk).double() for chunk in chunks])

    def read_filled(self, weight: Weight, chunk: Chunk, part: Entry, byte: int) -> Tensor:
        """Return the values of a chunk if all bytes of one part were ``byte``, (r, c); valid until the next call."""
        self._workspaces[2].fill((part,), byte)
        return weight.dequantize(chunk, self._workspaces[2]).weight

    def read_scaling(self, weight: Weight, chunk: Chunk) -> Scaling | None:
        """Return the factor and the offset of each code of a chunk, (r, c) float32 each; None if they are unknown."""
        scaling = weight.scaling(chunk, self._workspaces[:2])
        if scaling is None:
            return None
        unit, shift = (None if side is None else side.float().expand(chunk.shape).clone() for side in scaling)
        return None if unit is None else Scaling(unit, shift)

    def iterate_scales(self, entry: Entry) -> Iterator[Tensor]:
        """Yield all numbers of an entry as float32, some at a time; each is valid until the next."""
        return iterate_scales(entry, self.sides[0])

    def read_number(self, entry: Entry) -> float:
        """Return the only number of an entry."""
        return float(next(self.iterate_scales(entry)))

    def measure_error(self, weights: Weights, chunk: Chunk) -> tuple[float, float]:
        """Return Σx² and Σ(y - x)² over a chunk."""
        (first, second), is_fine = (
            zip(weights, self.sides, strict=True),
            not any(weight.needs_float64 for weight in weights),
        )
        if is_fine and self._kernel and (error := measure_error(self._kernel, (first, second), chunk)):
            return error
        x, y = (side.double().flatten() for side in self.read_both(weights, chunk))
        return float(x.dot(x)), float((e := y - x).dot(e))


def _find_dtype(weight: Weight) -> "torch.dtype":
    return torch.float64 if weight.needs_float64 else torch.float32


@contextmanager
def open_reader() -> Iterator[Reader]:
    """Open a reader for samples, in inference mode.

    Torch is limited to one thread: samples are so small that several threads would only wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield Reader()
    finally:
        torch.set_num_threads(before)
