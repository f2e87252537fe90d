"""A test of whether a tensor is a cast copy of another or was changed.

A cast to floats of m mantissa bits moves an element by at most half a step: 2^-(m+1) of its magnitude, or half of the
smallest subnormal. y is a cast of x if no element of y is farther from x than the dtype's nearest number. So ties may
go either way, values that the dtype can hold stay as they are, and widened values do not change at all.

y may come from x in three ways:

    x → y             a plain cast
    x → 16 bits → y   tools load models in BF16 or F16 and store them in another dtype: then all of y fits those 16 bits
    y → x             the original is the cast: the quantizer worked from numbers with more digits

Truncation or stochastic rounding can give the other neighbour, which is at most a step away.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import find_dtype

HALVES = ("BF16", "F16")  # dtypes in which tools load models
FLOAT32_ERROR = 2.0**-21  # relative error of float32 arithmetic on stored numbers, exp included


class Copy(StrEnum):
    """The relation of an unquantized tensor to the original."""

    SAME = "same"  # equal numbers, apart from rounding to the dtype
    COARSE = "coarse"  # neighbours of the nearest numbers: truncated, or rounded stochastically
    CHANGED = "changed"


ORDER = list(Copy)


class _Way(NamedTuple):
    """One way in which one side may have been made from the other."""

    through: torch.dtype  # the dtype in which digits are lost
    to: torch.dtype
    back: bool = False  # the cast was from the quantized to the original


class CastTest:
    """A test, chunk by chunk, of whether the second of two tensors is a cast of the first."""

    def __init__(self, original: str, quantized: str, computed: bool = False) -> None:
        """Start a test for these stored dtypes; ``computed``: the compared values come from float32 arithmetic."""
        x, y = find_dtype(original), find_dtype(quantized)
        ways = [_Way(y, y), *(_Way(half, y) for half in map(find_dtype, HALVES) if half not in (x, y))]
        if x != y:
            ways.append(_Way(x, x, back=True))
        self._found = dict.fromkeys(ways, Copy.SAME)
        self._tolerance = FLOAT32_ERROR if computed else 0.0

    @property
    def result(self) -> Copy:
        """The best relation that holds for all chunks so far."""
        return min(self._found.values(), key=ORDER.index)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Compare a chunk of both sides, (r, c) float32 or float64; elements that are not finite are ignored."""
        if x.dtype != y.dtype:
            x, y = x.double(), y.double()
        for way, before in self._found.items():
            if before != Copy.CHANGED:
                copy = self._classify(way, y, x) if way.back else self._classify(way, x, y)
                self._found[way] = max(before, copy, key=ORDER.index)

    def _classify(self, way: _Way, a: Tensor, b: Tensor) -> Copy:
        """Return the relation of ``b`` to ``a`` along ``way``."""
        cast = a.to(way.through)
        nearest = (cast if way.through == way.to else cast.to(way.to)).to(a.dtype)
        if torch.equal(nearest, b):
            return Copy.SAME
        finite = a.isfinite() & b.isfinite()
        if way.through != way.to and not bool(((b.to(way.through).to(b.dtype) == b) | ~finite).all()):
            return Copy.CHANGED
        off = (nearest - a).abs().nan_to_num(0.0, 0.0, 0.0)  # an overflow has no nearest number
        error = (b - a).abs().where(finite, 0.0)
        info = torch.finfo(way.through)
        # Some processors flush smaller numbers to zero, except in F16, whose smallest numbers matter.
        flushed = 0.0 if way.through == torch.float16 else info.smallest_normal
        limits = off + (self._tolerance * a.abs() + flushed)
        if bool((error <= limits).all()):
            return Copy.SAME
        steps = info.eps * (a.abs() + info.smallest_normal) + limits
        near = bool((error <= steps.where(off > 0, limits)).all())
        return Copy.COARSE if near and not way.back else Copy.CHANGED


def get_smallest_normal(original: str, quantized: str) -> float:
    """Return the smallest normal number of F16 for casts to F16, where weights are often smaller; 0 for others."""
    return torch.finfo(torch.float16).smallest_normal if quantized == "F16" != original else 0.0


def rounds_to_nearest(original: str, quantized: str, relative_max: float) -> bool:
    """Return whether the largest |e| / |x| alone proves a cast to another dtype; zeros in x must stay zero.

    Below the smallest normal number, |e| is relative to that number, because the spacing of floats is the same on both
    sides of it.
    """
    return original != quantized and relative_max <= torch.finfo(find_dtype(quantized)).eps / 2


def find_narrowest(dtypes: set[str]) -> str:
    """Return the float dtype with the smallest number of digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(find_dtype(dtype)).eps, default="F32")
