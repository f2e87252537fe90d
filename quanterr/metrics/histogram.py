"""Counts of |e| by size: what percentiles over elements are read from, exactly mergeable.

A bin holds the values that round to the same bfloat16, and its number is that bfloat16's bits. A
bfloat16 has eight significant bits, so a value read from a bin is off by 0.4 % at most.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

BINS = 0x7F80  # finite, not negative
LAST = BINS - 1
ROOM = 1 << 8  # a histogram grows by so many bins

CROPPED = 1 << 16  # elements; the histogram of fewer is cut to the bins that are used, or it would be larger


class Histogram:
    """How many are ``zeros``, and ``counts``, int64, of the bins from number ``first`` on; all others are empty."""

    __slots__ = ("counts", "first", "zeros")

    def __init__(self, zeros: int, counts: Tensor, first: int) -> None:
        """Take the counts as they are, on the CPU."""
        self.zeros, self.counts, self.first = zeros, counts.cpu(), first

    @classmethod
    def of(cls, magnitudes: Tensor) -> "Histogram":
        """Of numbers that are finite and not negative; what rounds to infinity is counted in the last bin."""
        bits = magnitudes.to(torch.bfloat16).view(torch.int16).view(-1)
        return cls.of_bits(bits.clamp_(max=LAST))

    @classmethod
    def of_bits(cls, bits: Tensor) -> "Histogram":
        """Of numbers of bins, (n,) int16; overwrites them."""
        if not bits.numel():
            return cls.empty()
        below = 0  # the number of the bin below the lowest that is used, to which the zeros go
        if bits.numel() < CROPPED:
            below = int((bits - 1).bitwise_and_(0x7FFF).amin())  # zeros come last
            bits.clamp_(min=below).sub_(below)
        counts = torch.bincount(bits)
        return cls(int(counts[0]), counts[1:], below + 1)

    @classmethod
    def empty(cls) -> "Histogram":
        """Of nothing."""
        return cls(0, torch.zeros(0, dtype=torch.int64), 1)

    @property
    def stop(self) -> int:
        """The number of the first bin behind the counts."""
        return self.first + self.counts.numel()

    def add(self, other: "Histogram") -> None:
        """Merge another into this."""
        self.zeros += other.zeros
        if not other.counts.numel():
            return
        with torch.inference_mode():  # whichever of them came from a worker
            if other.first < self.first or other.stop > self.stop:
                self._make_room(other.first, other.stop)
            begin = other.first - self.first
            self.counts[begin : begin + other.counts.numel()].add_(other.counts)

    def _make_room(self, first: int, stop: int) -> None:
        if self.counts.numel():
            first, stop = min(first, self.first), max(stop, self.stop)
        first, stop = first // ROOM * ROOM, -(-stop // ROOM) * ROOM
        counts = torch.zeros(stop - first, dtype=torch.int64)
        counts[self.first - first : self.stop - first] = self.counts
        self.counts, self.first = counts, first

    def __add__(self, other: "Histogram") -> "Histogram":
        both = Histogram.empty()
        both.add(self)
        both.add(other)
        return both

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return self._facts() == other._facts()

    def _facts(self) -> tuple[int, list[tuple[int, int]]]:
        used = self.counts.nonzero().view(-1)
        return self.zeros, list(zip((used + self.first).tolist(), self.counts[used].tolist(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def values_at(self, ranks: Sequence[int]) -> list[float]:
        """The values of those ranks, counted from 1 in ascending order."""
        places = torch.searchsorted(self.counts.cumsum(0), torch.tensor([rank - self.zeros for rank in ranks]))
        bits = (places + self.first).tolist()
        return [0.0 if rank <= self.zeros else _value(bin) for rank, bin in zip(ranks, bits, strict=True)]


@lru_cache(maxsize=1 << 12)
def _value(bin: int) -> float:
    """The bfloat16 of those bits; one object for many layers."""
    value: float = struct.unpack("<f", struct.pack("<I", bin << 16))[0]
    return value
