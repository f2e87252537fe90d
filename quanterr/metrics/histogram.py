"""A histogram of |e|, exactly mergeable, for percentiles over elements.

A bin counts the values that round to the same bfloat16, and its number is the bits of this bfloat16. A bfloat16 has
eight significant bits, so a value read from a bin is off by at most 0.4 %.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from quanterr.lazy_torch import Tensor, torch

BINS = 0x7F80  # one for each finite, non-negative bfloat16
LAST_BIN = BINS - 1
BIN_STEP = 1 << 8  # a histogram grows in steps of this many bins

# With fewer elements, unused bins are cut, as the histogram would be larger than the data.
MIN_UNCROPPED_ELEMENTS = 1 << 16


class Histogram:
    """The number of ``zeros``, and int64 ``counts`` of the bins from number ``first`` on; all other bins are empty."""

    __slots__ = ("counts", "first", "known", "zeros")

    def __init__(self, zeros: int, counts: Tensor, first: int, known: Mapping[int, int] | None = None) -> None:
        """Keep the counts, uncopied if they are on the CPU; ``known`` maps ranks to their bins."""
        self.zeros, self.counts, self.first, self.known = zeros, counts.cpu(), first, known or {}

    @classmethod
    def of(cls, magnitudes: Tensor) -> "Histogram":
        """Count finite, non-negative numbers; those that round to infinity are counted in the last bin."""
        bits = magnitudes.to(torch.bfloat16).view(torch.int16).view(-1)
        return cls.of_bits(bits.clamp_(max=LAST_BIN))

    @classmethod
    def of_bits(cls, bits: Tensor) -> "Histogram":
        """Count bin numbers, (n,) int16, which are overwritten."""
        if not bits.numel():
            return cls.empty()
        below = 0  # the bin below the lowest used one, in which zeros are counted
        if bits.numel() < MIN_UNCROPPED_ELEMENTS:
            below = int((bits - 1).bitwise_and_(0x7FFF).amin())  # zeros become the largest number
            bits.clamp_(min=below).sub_(below)
        counts = torch.bincount(bits)
        return cls(int(counts[0]), counts[1:], below + 1)

    @classmethod
    def empty(cls) -> "Histogram":
        """Return an empty histogram."""
        return cls(0, torch.zeros(0, dtype=torch.int64), 1)

    @property
    def stop(self) -> int:
        """The number of the first bin after the counts."""
        return self.first + self.counts.numel()

    def add(self, other: "Histogram") -> None:
        """Merge another histogram into this one."""
        self.zeros, self.known = self.zeros + other.zeros, {}
        if not other.counts.numel():
            return
        if torch.is_inference_mode_enabled():
            self._add_counts(other)
        else:
            with torch.inference_mode():  # counts may be inference tensors from a worker
                self._add_counts(other)

    def _add_counts(self, other: "Histogram") -> None:
        n = other.counts.numel()
        self.make_room(other.first, other.first + n)
        self.counts.narrow(0, other.first - self.first, n).add_(other.counts)

    def make_room(self, first: int, stop: int) -> None:
        """Add bins so that all bins from ``first`` to ``stop`` exist."""
        if self.first <= first and stop <= self.stop:
            return
        if self.counts.numel():
            first, stop = min(first, self.first), max(stop, self.stop)
        first, stop = first // BIN_STEP * BIN_STEP, -(-stop // BIN_STEP) * BIN_STEP
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
        return self._contents() == other._contents()

    def _contents(self) -> tuple[int, list[tuple[int, int]]]:
        used = self.counts.nonzero().view(-1)
        return self.zeros, list(zip((used + self.first).tolist(), self.counts[used].tolist(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def values_at(self, ranks: Sequence[int]) -> list[float]:
        """Return the values at ascending ranks, which count from 1."""
        if not self.known.keys() >= set(ranks):
            places = torch.searchsorted(self.counts.cumsum(0), torch.tensor([rank - self.zeros for rank in ranks]))
            self.known = dict(zip(ranks, (places + self.first).tolist(), strict=True))
        return [0.0 if rank <= self.zeros else _value(self.known[rank]) for rank in ranks]


@lru_cache(maxsize=1 << 12)
def _value(bin: int) -> float:
    """Return the bfloat16 with these bits as a float, cached so that layers share the objects."""
    value: float = struct.unpack("<f", struct.pack("<I", bin << 16))[0]
    return value
