"""Where stored tensors can be read in several ways, the one that the original bears out.

A format gives the reading that label and shapes tell, and the others as its ``readings``. They are tried
on a few rows, and only where the first is further off than any right one: a switch is told as a doubt.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf, isfinite, sqrt

import torch

from quanterr.chunks import Chunk
from quanterr.formats import Weight
from quanterr.pairing import Pair
from quanterr.tensors import Workspace

# Relative error ||e|| / ||x||: right readings are below the first, and wrong ones this many times worse.
SUSPICIOUS = 0.35
BETTER = 3.0
# Readings that differ by one step of the codes: rounding is a third of a step, and one step more thrice as much.
CLEARLY = 1.5

PLACES, ROWS, ELEMENTS = 4, 8, 1 << 15  # of a sample: places, rows and elements at each


def settle(pairs: list[Pair]) -> None:
    """Replace, in place, each quantized weight that another of its readings brings much closer to the original."""
    workspaces = Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))
    with torch.inference_mode():
        for number, pair in enumerate(pairs):
            if pair.quantized.readings:
                pairs[number] = replace(pair, quantized=_settled(pair, workspaces))


def _settled(pair: Pair, workspaces: tuple[Workspace, Workspace]) -> Weight:
    first = pair.quantized
    error = relative_error(pair.original, first, workspaces)
    if error <= SUSPICIOUS and not first.alike:
        return first
    errors = [(relative_error(pair.original, weight, workspaces), weight) for weight in first.readings]
    least, best = min(errors, key=lambda found: found[0])
    if not least < error or (CLEARLY if first.alike else BETTER) * least > error:
        return first
    told = f"{error:.3g}" if isfinite(error) else "not finite"
    doubt = (
        f"read as {best.evidence[0]}: relative error {least:.3g} on a sample; "
        f"as label and shapes tell ({first.evidence[0]}) it is {told}"
    )
    return replace(best, doubts=(*first.doubts, doubt))


def relative_error(original: Weight, quantized: Weight, workspaces: tuple[Workspace, Workspace]) -> float:
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
