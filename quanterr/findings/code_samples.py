"""Rows spread over a weight, with their codes' scales, of the few weights that are read again."""

from typing import NamedTuple

from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.kernel.levels import CodeCells, Levels, Scaling, find_cells, find_nearest
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.tensors.chunks import Chunk

RUNS, RUN = 16, 16  # runs of rows, spread over a weight, and the rows of each
READ = 1 << 20  # elements read of a weight


class CodeSample(NamedTuple):
    """Runs of rows of both sides, (r, c) float32 each; both are rotated if the codes are."""

    x: Tensor
    y: Tensor
    unit: Tensor  # factor of the codes
    shift: Tensor | None  # what is added to them
    levels: Levels

    def find_cells(self, factor: Tensor | float = 1.0) -> CodeCells:
        """Return the codes around ``factor`` · x."""
        return find_cells(self.levels, self.x * factor, Scaling(self.unit, self.shift))

    def find_nearest(self, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the values of the nearest codes to ``factor`` · x, and which are neither the first nor the last."""
        return find_nearest(self.levels, self.x * factor, Scaling(self.unit, self.shift))

    def split(self, width: int) -> "CodeSample":
        """Return runs of ``width`` columns, which divides the columns, as rows."""
        x, y, unit, shift = (None if side is None else side.reshape(-1, width) for side in self[:4])
        assert x is not None and y is not None and unit is not None  # noqa: S101, PT018
        return CodeSample(x, y, unit, shift, self.levels)


def read_code_sample(pair: Pair, reader: Reader) -> CodeSample | None:
    """Read runs of rows spread over a weight; None if its levels or scales are unknown."""
    weight, turn = pair.quantized.unrotated, pair.quantized.rotated
    if weight.levels is None:
        return None
    sides: list[tuple[Tensor, Tensor]] = []
    scales: list[Scaling] = []
    for run in choose_runs(*weight.matrix):
        chunk = Chunk(run.start, run.stop, 0, weight.matrix[1])
        x, y = (side.float() for side in reader.read_both((pair.original, weight), chunk))
        found = reader.read_scaling(weight, chunk)
        if found is None:
            return None
        sides.append((turn.rotate(x, reader.sides[0]) if turn else x, y))
        scales.append(found)
    x, y = (torch.cat(side) for side in zip(*sides, strict=True))
    units, shifts = zip(*scales, strict=True)
    shift = None if shifts[0] is None else torch.cat(shifts)
    return CodeSample(x, y, torch.cat(units), shift, weight.levels)


def choose_runs(rows: int, cols: int) -> list[range]:
    """Return runs of rows, spread over a matrix, that do not overlap."""
    height = min(RUN, max(READ // cols // RUNS, 1), rows)
    starts = sorted({number * (rows - height) // (RUNS - 1) for number in range(RUNS)})
    after = [0, *(start + height for start in starts)]
    return [range(max(start, end), start + height) for start, end in zip(starts, after, strict=False)]


def find_cells_of(weight: Weight, chunk: Chunk, x: Tensor, reader: Reader) -> CodeCells | None:
    """Return the codes around the numbers ``x`` of a chunk, (r, c) float32; None if levels or scales are unknown."""
    scales = reader.read_scaling(weight, chunk)
    return None if scales is None or weight.levels is None else find_cells(weight.levels, x, scales)
