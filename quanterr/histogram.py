"""Counts of |e| by size: what percentiles over elements are read from, exactly mergeable.

A bin holds the values that round to the same bfloat16, and its number is that bfloat16's bits. A
bfloat16 has eight significant bits, so a value read from a bin is off by 0.4 % at most.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BINS = 0x7F80  # finite, not negative

CROPPED = 1 << 16  # elements; the histogram of fewer is cut to the bins that are used, or it would be larger


class Histogram:
    """``counts``, int64, of the bins from number ``first`` on; all others are empty."""

    __slots__ = ("counts", "first")

    def __init__(self, counts: Tensor, first: int = 0) -> None:
        """Take the counts as they are, on the CPU."""
        self.counts, self.first = counts.cpu(), first

    @classmethod
    def of(cls, magnitudes: Tensor) -> "Histogram":
        """Of numbers that are finite and not negative; what rounds to infinity is counted in the last bin."""
        bits = magnitudes.to(torch.bfloat16).view(torch.int16).view(-1)
        return cls.of_bits(bits.clamp_(max=BINS - 1))

    @classmethod
    def of_bits(cls, bits: Tensor) -> "Histogram":
        """Of numbers of bins, (n,) int16; overwrites them."""
        if bits.numel() >= CROPPED:
            return cls(torch.bincount(bits, minlength=BINS))
        first = int(bits.amin()) if bits.numel() else 0
        return cls(torch.bincount(bits.sub_(first)), first)

    @classmethod
    def empty(cls) -> "Histogram":
        """Of nothing, with room for all bins."""
        return cls(torch.zeros(BINS, dtype=torch.int64))

    def add(self, other: "Histogram") -> None:
        """Merge another into this, which must have room for its bins."""
        begin = other.first - self.first
        self.counts[begin : begin + len(other.counts)].add_(other.counts)

    def __add__(self, other: "Histogram") -> "Histogram":
        both = Histogram.empty()
        both.add(self)
        both.add(other)
        return both

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        mine, others = Histogram.empty() + self, Histogram.empty() + other
        return torch.equal(mine.counts, others.counts)

    __hash__ = None  # type: ignore[assignment]

    def values_at(self, ranks: Sequence[int]) -> list[float]:
        """The values of those ranks, counted from 1 in ascending order."""
        bins = torch.searchsorted(self.counts.cumsum(0), torch.tensor(ranks)) + self.first
        return bins.to(torch.int16).view(torch.bfloat16).tolist()
