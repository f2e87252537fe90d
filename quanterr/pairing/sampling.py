"""How far two weights are apart, told from a few rows: for deciding between readings before the run."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf, isfinite, sqrt

import torch

from quanterr.formats import Weight
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

Workspaces = tuple[Workspace, Workspace]

# Relative error ||e|| / ||x||: right readings are below the first, and wrong ones this many times worse.
SUSPICIOUS = 0.35
BETTER = 3.0

# Of a square weight and its transpose, or of two orders of rows: the right one is below the first, even at two
# bits, the other above the second.
RELATED, UNRELATED = 0.7, 1.2

# A tensor and its copy, in another dtype perhaps.
SAME = 0.01

PLACES, ROWS, ELEMENTS = 4, 8, 1 << 15  # of a sample: places, rows and elements at each


@contextmanager
def on_cpu() -> Iterator[Workspaces]:
    """Where rows of two weights are read, on the CPU."""
    with torch.inference_mode():
        yield Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))


def relative_error(original: Weight, quantized: Weight, workspaces: Workspaces) -> float:
    """||y - x|| / ||x|| over a few rows; 0 where x is zero there, infinity where something is not finite."""
    signal = noise = 0.0
    for chunk in _sample(*original.matrix):
        x = original.dequantize(chunk, workspaces[0]).weight.double()
        e = quantized.dequantize(chunk, workspaces[1]).weight.double() - x
        signal, noise = signal + float((x * x).sum()), noise + float((e * e).sum())
    if not isfinite(noise) or not isfinite(signal):
        return inf
    return sqrt(noise / signal) if signal else 0.0


def _sample(rows: int, cols: int) -> Iterable[Chunk]:
    """A few chunks, spread over the rows."""
    step = max(-(-rows // PLACES), 1)
    n = max(min(ROWS, ELEMENTS // max(cols, 1)), 1)
    for row in range(0, rows, step):
        yield Chunk(row, min(row + n, rows), 0, cols if n > 1 else min(cols, ELEMENTS))
