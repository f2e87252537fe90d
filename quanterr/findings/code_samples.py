"""Samples of rows, with the scales of their codes, from the few weights that checks read again."""

from typing import NamedTuple

from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.kernel.levels import CodeCells, Levels, Scaling, find_cells, find_nearest
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.tensors.chunks import Chunk

MAX_RUNS, ROWS_PER_RUN = 16, 16  # maximum number of runs of rows, spread over a weight, and of the rows of each
MAX_SAMPLE_ELEMENTS = 1 << 20  # maximum number of elements to read of a weight


class CodeSample(NamedTuple):
    """Runs of rows of both sides, (r, c) float32 each; both sides are rotated if the codes are rotated."""

    x: Tensor
    y: Tensor
    unit: Tensor  # factor of the codes
    shift: Tensor | None  # what is added to them
    levels: Levels

    def find_cells(self, factor: Tensor | float = 1.0) -> CodeCells:
        """Return the codes around ``factor`` · x."""
        return find_cells(self.levels, self.x * factor, Scaling(self.unit, self.shift))

    def find_nearest(self, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the values of the codes nearest to ``factor`` · x, and whether each is an inner code, not an end."""
        return find_nearest(self.levels, self.x * factor, Scaling(self.unit, self.shift))

    def split(self, width: int) -> "CodeSample":
        """Return the sample with each run of ``width`` columns as a row; ``width`` divides the number of columns."""
        x, y, unit, shift = (None if side is None else side.reshape(-1, width) for side in self[:4])
        assert x is not None and y is not None and unit is not None  # noqa: S101, PT018
        return CodeSample(x, y, unit, shift, self.levels)


def read_code_sample(pair: Pair, reader: Reader) -> CodeSample | None:
    """Read runs of rows spread over a weight; return None if its levels or scales are unknown."""
    weight, rotation = pair.quantized.unrotated, pair.quantized.rotated
    if weight.levels is None:
        return None
    sides: list[tuple[Tensor, Tensor]] = []
    scales: list[Scaling] = []
    for run in choose_runs(*weight.matrix):
        chunk = Chunk(run.start, run.stop, 0, weight.matrix[1])
        x, y = (side.float() for side in reader.read_both((pair.original, weight), chunk))
        scaling = reader.read_scaling(weight, chunk)
        if scaling is None:
            return None
        sides.append((rotation.rotate(x, reader.sides[0]) if rotation else x, y))
        scales.append(scaling)
    x, y = (torch.cat(side) for side in zip(*sides, strict=True))
    units, shifts = zip(*scales, strict=True)
    shift = None if shifts[0] is None else torch.cat(shifts)
    return CodeSample(x, y, torch.cat(units), shift, weight.levels)


def choose_runs(rows: int, cols: int) -> list[range]:
    """Return runs of rows, spread over a matrix, that do not overlap."""
    height = min(ROWS_PER_RUN, max(MAX_SAMPLE_ELEMENTS // cols // MAX_RUNS, 1), rows)
    starts = sorted({number * (rows - height) // (MAX_RUNS - 1) for number in range(MAX_RUNS)})
    after = [0, *(start + height for start in starts)]
    return [range(max(start, end), start + height) for start, end in zip(starts, after, strict=False)]


def find_cells_of(weight: Weight, chunk: Chunk, x: Tensor, reader: Reader) -> CodeCells | None:
    """Return the codes around the numbers ``x`` of a chunk, (r, c) float32; None if levels or scales are unknown."""
    scales = reader.read_scaling(weight, chunk)
    return None if scales is None or weight.levels is None else find_cells(weight.levels, x, scales)
