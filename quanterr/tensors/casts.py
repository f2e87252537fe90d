"""Whether numbers are others once cast: each as near as its dtype has one. What is not was changed.

A cast to floats of m mantissa bits moves an element by half a step at most, 2^-(m+1) of itself, or half of the smallest
subnormal. It is proved by doing it: the nearest number of the dtype is known, so y is a cast of x if no element is
farther from x than that one. So ties may go either way, what the dtype can hold stays as it is, and what is widened
does not change at all.

Three ways lead from x to y:

    x → y             the cast itself
    x → 16 bits → y   tools load models in BF16 or F16 and store them in another dtype: then all of y fits those 16 bits
    y → x             the original is the cast, and the quantizer had more digits

To truncate in place of rounding, or to round at random, leaves the other neighbour: a step at most.
"""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.tensors.workspace import TORCH_DTYPES

HALVES = (torch.bfloat16, torch.float16)  # dtypes in which models are held on their way
ROUNDED = 2.0**-21  # relative: what float32 arithmetic on stored numbers, exp included, leaves to chance


class Copy(StrEnum):
    """What a tensor that is not quantized is of the original's."""

    SAME = "same"  # the same numbers, as near as the dtype has them
    COARSE = "coarse"  # neighbours of the nearest: truncated, or rounded at random
    CHANGED = "changed"


ORDER = list(Copy)


class _Way(NamedTuple):
    """How one side may have come from the other."""

    through: torch.dtype  # where digits are lost
    to: torch.dtype
    back: bool = False  # from the quantized to the original


class CastTest:
    """Takes in two tensors, chunk by chunk, and tells whether the second is the first once cast."""

    def __init__(self, original: str, quantized: str, computed: bool = False) -> None:
        """For tensors stored in these dtypes; ``computed``: what is compared was computed from them in float32."""
        x, y = TORCH_DTYPES[original], TORCH_DTYPES[quantized]
        ways = [_Way(y, y), *(_Way(half, y) for half in HALVES if half not in (x, y))]
        if x != y:
            ways.append(_Way(x, x, back=True))
        self._found = dict.fromkeys(ways, Copy.SAME)
        self._tolerance = ROUNDED if computed else 0.0

    @property
    def result(self) -> Copy:
        """What the best way leaves, of all that was taken in."""
        return min(self._found.values(), key=ORDER.index)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in a chunk of both sides, (r, c) float32 or float64; elements that are not finite are left out."""
        if x.dtype != y.dtype:
            x, y = x.double(), y.double()
        for way, before in self._found.items():
            if before != Copy.CHANGED:
                found = self._along(way, y, x) if way.back else self._along(way, x, y)
                self._found[way] = max(before, found, key=ORDER.index)

    def _along(self, way: _Way, a: Tensor, b: Tensor) -> Copy:
        """What ``b`` is of ``a``, that way."""
        cast = a.to(way.through)
        nearest = (cast if way.through == way.to else cast.to(way.to)).to(a.dtype)
        if torch.equal(nearest, b):
            return Copy.SAME
        finite = a.isfinite() & b.isfinite()
        if way.through != way.to and not bool(((b.to(way.through).to(b.dtype) == b) | ~finite).all()):
            return Copy.CHANGED
        off = (nearest - a).abs().nan_to_num(0.0, 0.0, 0.0)  # what overflows has no nearest number
        error = (b - a).abs().where(finite, 0.0)
        limits = off + (self._tolerance * a.abs() + _least(way.through))
        if bool((error <= limits).all()):
            return Copy.SAME
        info = torch.finfo(way.through)
        steps = info.eps * (a.abs() + info.smallest_normal) + limits
        near = bool((error <= steps.where(off > 0, limits)).all())
        return Copy.COARSE if near and not way.back else Copy.CHANGED


def least_normal(original: str, quantized: str) -> float:
    """That of the dtype that x is cast to, where numbers below it are usual: of F16. 0 of others."""
    return torch.finfo(torch.float16).smallest_normal if quantized == "F16" != original else 0.0


def rounds_to_nearest(original: str, quantized: str, relative_max: float) -> bool:
    """Whether the largest |e| / |x| alone proves a cast to another dtype, of elements that stay zero where x is.

    Below the least normal number |e| / that number counts: numbers there are as far apart as just above it.
    """
    return original != quantized and relative_max <= torch.finfo(TORCH_DTYPES[quantized]).eps / 2


def narrowest(dtypes: "set[str]") -> str:
    """That of several dtypes of floats with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(TORCH_DTYPES[dtype]).eps, default="F32")


def _least(dtype: torch.dtype) -> float:
    """Below it some processors make zeros: of no dtype whose smallest numbers matter."""
    return 0.0 if dtype == torch.float16 else torch.finfo(dtype).smallest_normal
