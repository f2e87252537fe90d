"""Recipes on a sample of the rows of a weight: about what all rows would give, and how sure that is.

A weight is cut into runs of rows, and these into as many stretches as are to be read: each gives one run, at random.
Σe² and Σx² of the runs are scaled up to all rows, and their spread says how far off that may be: error over signal is a
ratio estimate of a random sample of clusters (Cochran, Sampling Techniques, 3rd edition, 6.4 and 9.2).

Errors of rows have long tails: a few rows with outliers may make most of a weight's, and a sample may miss them. So the
worst run counts twice, and margins are half as wide again. Of MiniLM's weights, which have such rows, 95 of 100 are
within them then; of models without, 99.

Rows have the values that they have in the whole weight. Where scales depend on all rows (one of a tensor, or scales
that are quantized again) all rows are read for these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import ceil, log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.errors import UsageError
from quanterr.recipes.base import FLOATS
from quanterr.recipes.candidate import QuantizedFile
from quanterr.recipes.matrices import Matrix
from quanterr.recipes.tensors import fake_quantized, weight_of
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import display

RUN_BYTES = 1 << 16  # of a run, where a weight has enough of them: less is slow to read
LEAST_RUNS = 8  # of a weight that are read, or all that it has
WANTED_RUNS = 32  # of a weight, for which runs are made lower
PIECE = 1 << 20  # elements that are quantized at once
DB = 10 / log(10)
WIDER = 1.5  # than of normal errors


def share_of(text: str) -> float:
    """``10%`` as 0.1.

    Raises:
        UsageError: anything else, or not between 0 and 100 %.
    """
    try:
        percent = float(text.strip().removesuffix("%")) if text.strip().endswith("%") else 0.0
    except ValueError:
        percent = 0.0
    if not 0 < percent < 100:
        raise UsageError(f"--sample {display(text)}: give a share of the rows between 0 and 100 %, such as 10%")
    return percent / 100


class Runs(NamedTuple):
    """Runs of ``height`` rows of a weight, of which some are read; the last one of the weight may be lower."""

    rows: int  # of the weight
    height: int
    numbers: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many there are."""
        return ceil(self.rows / self.height)

    @property
    def read(self) -> int:
        """Rows that are read."""
        return sum(stop - first for first, stop in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """First and last row of each that is read."""
        return [(n * self.height, min((n + 1) * self.height, self.rows)) for n in self.numbers]


def drawn(matrix: Matrix, share: float, together: int) -> Runs:
    """Draw the runs of a matrix to read; always the same of a name. Runs begin at multiples of ``together`` rows."""
    name, rows = matrix.name, matrix.shape[0]
    height = max(RUN_BYTES // max(matrix.nbytes // rows, 1) // together, 1) * together
    while height > together and ceil(rows / height) * share < WANTED_RUNS:
        height = max(height // 2 // together, 1) * together
    total = ceil(rows / height)
    n = min(max(round(total * share), LEAST_RUNS), total)
    seed = int.from_bytes(sha256(name.encode("utf-8", "surrogatepass")).digest()[:7])
    random = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    edges = [stretch * total // n for stretch in range(n + 1)]
    stretches = zip(pairwise(edges), random, strict=True)
    return Runs(rows, height, tuple(low + int(x * (high - low)) for (low, high), x in stretches))


@dataclass
class Estimate:
    """A weight by a recipe: Σe² and Σx² of each run that was read."""

    runs: Runs
    noises: list[float]
    signals: list[float]

    @property
    def _up(self) -> float:
        """All rows, for each that was read."""
        return self.runs.rows / self.runs.read

    @property
    def noise(self) -> float:
        """Σe² of all rows, by estimate."""
        return sum(self.noises) * self._up

    @property
    def signal(self) -> float:
        """Σx² of all rows, by estimate."""
        return sum(self.signals) * self._up

    @property
    def ratio(self) -> float:
        """Error over signal."""
        return self.noise / self.signal if self.signal else 0.0

    def variance(self, ratio: float) -> float:
        """That of Σe² - ratio · Σx² of all rows."""
        n, total = len(self.noises), self.runs.total
        if n == total:
            return 0.0
        squares = [(noise - ratio * signal) ** 2 for noise, signal in zip(self.noises, self.signals, strict=True)]
        return total**2 * (1 - n / total) * (sum(squares) + max(squares)) / n**2


def margin(estimates: Sequence[Estimate]) -> float | None:
    """How near the SNR of all these weights together is, in 95 of 100 samples [dB]; None where it is undefined."""
    noise, signal = sum(one.noise for one in estimates), sum(one.signal for one in estimates)
    if not noise or not signal:
        return None
    variance = sum(one.variance(noise / signal) for one in estimates)
    return WIDER * DB * _quantile(sum(len(one.noises) - 1 for one in estimates)) * sqrt(variance) / noise


def _quantile(freedom: int) -> float:
    """That of Student's t with so many degrees of freedom, below which 97.5 % are; within 2 % from 7 on."""
    return 1.96 + 2.4 / max(freedom, 1)


@torch.inference_mode()
def estimated(matrix: Matrix, share: float, files: Sequence[QuantizedFile | None]) -> list[Estimate | None]:
    """Estimate a matrix by each of some recipes: how they store it, None for those that cannot.

    Raises:
        CheckpointError: NaN or infinity, or the file cannot be read.
    """
    heights = [0 if file is None else file.recipe.scheme.together(file.source) for file in files]
    runs = {height: drawn(matrix, share, height) for height in sorted(set(heights) - {0})}
    found = [Estimate(runs[height], [], []) if height else None for height in heights]
    for own in runs.values():
        for spans in _pieces(own, matrix.shape[1]):
            _measure(matrix, spans, [(f, e) for f, e in zip(files, found, strict=True) if f and e and e.runs is own])
    return found


def _measure(matrix: Matrix, spans: Sequence[tuple[int, int]], of: Sequence[tuple[QuantizedFile, Estimate]]) -> None:
    """Measure some runs by the recipes that are measured on these."""
    x = _rows(matrix, spans)
    heights = [stop - first for first, stop in spans]
    signals = _by_runs(x.float(), heights)
    for file, estimate in of:
        estimate.noises += _by_runs(_values(file, x, spans) - x.float(), heights)
        estimate.signals += signals


def _pieces(runs: Runs, cols: int) -> Iterator[list[tuple[int, int]]]:
    """The runs that are quantized together."""
    step = max(PIECE // (runs.height * max(cols, 1)), 1)
    spans = runs.spans()
    for first in range(0, len(spans), step):
        yield spans[first : first + step]


def _rows(matrix: Matrix, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Read rows of a matrix in its dtype."""
    return torch.cat([matrix.read(first, stop).to(FLOATS[matrix.dtype], copy=True) for first, stop in spans])


def _values(file: QuantizedFile, x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """The rows as the recipe stores them, float32."""
    if file.recipe.scheme.is_local:
        return fake_quantized(x, file.recipe)
    weight, workspace = weight_of(file), Workspace(torch.device("cpu"))
    chunks = [Chunk(first, stop, 0, x.shape[1]) for first, stop in spans]
    return torch.cat([weight.dequantize(chunk, workspace).weight.clone() for chunk in chunks])


def _by_runs(values: Tensor, heights: Sequence[int]) -> list[float]:
    """Σ of squares of each run."""
    of_rows = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square_()
    return [float(part.sum()) for part in of_rows.split(list(heights))]
