"""Where stored tensors can be read in several ways, the one that the original bears out.

A format gives the reading that label and shapes tell, and the others as its ``readings``. They are tried
on a few rows, and only where the first is further off than any right one: a switch is told as a doubt.
"""

from dataclasses import replace
from math import isfinite

import torch

from quanterr.conventions import may_be_turned
from quanterr.formats import Weight
from quanterr.pairing import Pair
from quanterr.sampling import BETTER, SUSPICIOUS, relative_error
from quanterr.tensors import Workspace
from quanterr.views import transposed

# Readings that differ by one step of the codes: rounding is a third of a step, and one step more thrice as much.
CLEARLY = 1.5

# Of a square weight and its transpose: one is below the first, the other above the second.
RELATED, UNRELATED = 0.7, 1.2


def settle(pairs: list[Pair]) -> None:
    """Replace, in place, each pair that another reading of its tensors brings much closer together."""
    workspaces = Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))
    with torch.inference_mode():
        for number, pair in enumerate(pairs):
            if pair.quantized.readings:
                pairs[number] = replace(pair, quantized=_settled(pair, workspaces))
            if _may_be_turned(pair):
                pairs[number] = _turned(pairs[number], workspaces)


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


def _may_be_turned(pair: Pair) -> bool:
    shape = pair.original.shape
    square = len(shape) > 1 and shape[-1] == shape[-2]
    return square and pair.original.format == "dense" and may_be_turned(pair.name, shape)


def _turned(pair: Pair, workspaces: tuple[Workspace, Workspace]) -> Pair:
    """A square original the other way round, if that is how the quantized weight has it."""
    if relative_error(pair.original, pair.quantized, workspaces) < UNRELATED:
        return pair
    turned = transposed(pair.original)
    error = relative_error(turned, pair.quantized, workspaces)
    if not error < RELATED:
        return pair
    said = f"the original is stored [in, out]: relative error {error:.3g} on a sample when it is transposed"
    quantized = replace(pair.quantized, evidence=(*pair.quantized.evidence, said))
    return replace(pair, original=turned, quantized=quantized)
