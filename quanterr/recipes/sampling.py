"""Recipes on a sample of a weight's rows: an estimate for all rows, with an error margin.

A weight is cut into runs of rows, and the runs into as many strata as runs are to be read: each stratum contributes one
random run. Σe² and Σx² of the runs are scaled up to all rows, and their spread gives the margin: error over signal is a
ratio estimate of a random sample of clusters (Cochran, Sampling Techniques, 3rd edition, 6.4 and 9.2).

Errors of rows have long tails: a few rows with outliers may make up most of a weight's error, and a sample may miss
them. So the worst run counts twice, and margins are 50 % wider. With that, 95 % of estimates are within the margin for
MiniLM's weights, which have such rows, and 99 % for models without.

A sampled row is quantized as it would be in the whole weight. If scales depend on all rows (a scale of the tensor, or
scales that are quantized again), all rows are read for the scales.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from math import ceil, log, sqrt
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import FLOATS
from quanterr.recipes.matrices import Matrix
from quanterr.recipes.quantized_file import QuantizedFile
from quanterr.recipes.tensors import apply_recipe, read_weight
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import display

RUN_BYTES = 1 << 16  # size of a run, as smaller ones are slow to read; less if a weight would have too few runs
MIN_RUNS = 8  # minimum number of runs to read, unless the weight has fewer
WANTED_RUNS = 32  # desired number of runs to read; runs get fewer rows to reach it
PIECE_ELEMENTS = 1 << 20  # elements quantized at once
DB = 10 / log(10)
MARGIN_FACTOR = 1.5  # multiplies the margin of normally distributed errors


def parse_share(text: str) -> float:
    """Parse ``10%`` as 0.1.

    Raises:
        UsageError: the text is not a percentage between 0 and 100.
    """
    try:
        percent = float(text.strip().removesuffix("%")) if text.strip().endswith("%") else 0.0
    except ValueError:
        percent = 0.0
    if not 0 < percent < 100:
        raise UsageError(f"--sample {display(text)}: give a share of the rows between 0 and 100 %, such as 10%")
    return percent / 100


class Runs(NamedTuple):
    """Runs of ``height`` rows of a weight, of which ``numbers`` are read. The last run may have fewer rows."""

    rows: int  # rows of the weight
    height: int
    numbers: tuple[int, ...]

    @property
    def total(self) -> int:
        """Number of runs in the weight."""
        return ceil(self.rows / self.height)

    @property
    def read(self) -> int:
        """Number of rows that are read."""
        return sum(stop - first for first, stop in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and the stop row of each run that is read."""
        return [(n * self.height, min((n + 1) * self.height, self.rows)) for n in self.numbers]


def draw_runs(matrix: Matrix, share: float, together: int) -> Runs:
    """Choose the runs of a matrix to read, always the same for a name; they begin at multiples of ``together`` rows."""
    name, rows = matrix.name, matrix.shape[0]
    height = max(RUN_BYTES // max(matrix.nbytes // rows, 1) // together, 1) * together
    while height > together and ceil(rows / height) * share < WANTED_RUNS:
        height = max(height // 2 // together, 1) * together
    total = ceil(rows / height)
    n = min(max(round(total * share), MIN_RUNS), total)
    seed = int.from_bytes(sha256(name.encode("utf-8", "surrogatepass")).digest()[:7])
    random = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    edges = [stretch * total // n for stretch in range(n + 1)]
    stretches = zip(pairwise(edges), random, strict=True)
    return Runs(rows, height, tuple(low + int(x * (high - low)) for (low, high), x in stretches))


@dataclass
class Estimate:
    """The estimated error of a recipe on a weight, from Σe² and Σx² of each run that was read."""

    runs: Runs
    noises: list[float] = field(default_factory=list)
    signals: list[float] = field(default_factory=list)
    read_weighted: tuple[float, float] | None = None  # Σ importance · x² and e² of the runs; None without importance

    @property
    def _up(self) -> float:
        """The factor by which sums over the rows that were read become sums over all rows."""
        return self.runs.rows / self.runs.read

    @property
    def noise(self) -> float:
        """Estimated Σe² of all rows."""
        return sum(self.noises) * self._up

    @property
    def signal(self) -> float:
        """Estimated Σx² of all rows."""
        return sum(self.signals) * self._up

    @property
    def weighted_energies(self) -> tuple[float, float] | None:
        """Estimated Σ importance · x² and Σ importance · e² of all rows."""
        return (
            None if self.read_weighted is None else (self._up * self.read_weighted[0], self._up * self.read_weighted[1])
        )

    @property
    def ratio(self) -> float:
        """Error over signal."""
        return self.noise / self.signal if self.signal else 0.0

    def variance(self, ratio: float) -> float:
        """Return the variance of Σe² - ratio · Σx² over all rows."""
        n, total = len(self.noises), self.runs.total
        if n == total:
            return 0.0
        squares = [(noise - ratio * signal) ** 2 for noise, signal in zip(self.noises, self.signals, strict=True)]
        return total**2 * (1 - n / total) * (sum(squares) + max(squares)) / n**2


def pack_estimates(estimates: Mapping[str, Sequence[Estimate | None]]) -> bytes:
    """Return estimates by weight as bytes for another process, exact to the last digit."""
    plain = {
        name: [
            estimate and (estimate.runs, estimate.noises, estimate.signals, estimate.read_weighted) for estimate in of
        ]
        for name, of in estimates.items()
    }
    return zlib.compress(json.dumps(plain).encode(), 1)


def unpack_estimates(packed: bytes) -> dict[str, list[Estimate | None]]:
    """Return the estimates that :func:`pack_estimates` has packed."""

    def unpack(
        runs: tuple[int, int, list[int]], noises: list[float], signals: list[float], weighted: list[float] | None
    ) -> Estimate:
        rows, height, numbers = runs
        pair = None if weighted is None else (weighted[0], weighted[1])
        return Estimate(Runs(rows, height, tuple(numbers)), noises, signals, pair)

    plain = json.loads(zlib.decompress(packed))
    return {name: [estimate and unpack(*estimate) for estimate in of] for name, of in plain.items()}


def find_margin(estimates: Sequence[Estimate]) -> float | None:
    """Return the 95 % margin of the SNR over all these weights [dB]; None if it is undefined."""
    noise, signal = sum(estimate.noise for estimate in estimates), sum(estimate.signal for estimate in estimates)
    if not noise or not signal:
        return None
    variance = sum(estimate.variance(noise / signal) for estimate in estimates)
    freedom = sum(len(estimate.noises) - 1 for estimate in estimates)
    quantile = 1.96 + 2.4 / max(freedom, 1)  # the 97.5 % quantile of Student's t, to 3 % from 7 degrees of freedom on
    return MARGIN_FACTOR * DB * quantile * sqrt(variance) / noise


@torch.inference_mode()
def estimate_matrix(matrix: Matrix, share: float, files: Sequence[QuantizedFile | None]) -> list[Estimate | None]:
    """Estimate the errors of the recipes of ``files`` on a matrix; None for recipes that cannot store it.

    Raises:
        CheckpointError: the matrix holds NaN or infinity, or the file cannot be read.
    """
    heights = [0 if file is None else file.recipe.encoder.joint_rows(file.source) for file in files]
    runs = {height: draw_runs(matrix, share, height) for height in sorted(set(heights) - {0})}
    estimates = [Estimate(runs[height]) if height else None for height in heights]
    for drawn in runs.values():
        of = [(f, e) for f, e in zip(files, estimates, strict=True) if f and e and e.runs is drawn]
        spans, step = drawn.spans(), max(PIECE_ELEMENTS // (drawn.height * max(matrix.shape[1], 1)), 1)
        for first in range(0, len(spans), step):  # quantize ``step`` spans at once
            _measure_runs(matrix, spans[first : first + step], of)
    return estimates


def _measure_runs(
    matrix: Matrix, spans: Sequence[tuple[int, int]], of: Sequence[tuple[QuantizedFile, Estimate]]
) -> None:
    """Add the squared errors of some runs to the estimate of each recipe in ``of``."""
    x = torch.cat([matrix.read(first, stop).to(FLOATS[matrix.dtype], copy=True) for first, stop in spans])
    heights = [stop - first for first, stop in spans]
    signals = _sum_by_runs(x.float(), heights)
    for file, estimate in of:
        errors = _quantize_rows(file, x, spans) - x.float()
        estimate.noises += _sum_by_runs(errors, heights)
        estimate.signals += signals
        if file.importance is not None:
            before = estimate.read_weighted or (0.0, 0.0)
            by_column = (values.double().square().sum(0) for values in (x.float(), errors))
            signal, noise = (float((sums * file.importance).sum()) for sums in by_column)
            estimate.read_weighted = before[0] + signal, before[1] + noise


def _quantize_rows(file: QuantizedFile, x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the rows as the recipe stores them, float32."""
    if file.recipe.encoder.is_local:
        return apply_recipe(x, file.recipe, importance=file.importance)
    weight, reader = read_weight(file), Reader()
    return torch.cat([reader.read(weight, Chunk(first, stop, 0, x.shape[1])) for first, stop in spans])


def _sum_by_runs(values: Tensor, heights: Sequence[int]) -> list[float]:
    """Return the sum of squares of each run."""
    of_rows = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square_()
    return [float(part.sum()) for part in of_rows.split(list(heights))]
