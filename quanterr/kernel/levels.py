"""The levels of codes, which are their values before scaling, and the level nearest to a number.

For each element, two codes, usually the lowest and the highest, are dequantized by the format. So scales, zero points,
minima, factors, orders and low-rank products are applied as the format defines them. The values of all other codes lie
on the line through these two values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import log2
from typing import NamedTuple

from quanterr.kernel.enums import CodeKind
from quanterr.kernel.rounding import Codes, Round, find_codes, make_counts
from quanterr.kernel.structs import CodesStruct
from quanterr.lazy_torch import Tensor, torch

FLOAT32_MANTISSA = 23  # mantissa bits of a float32
FLOAT32_EXPONENT = 0xFF << FLOAT32_MANTISSA  # mask of the exponent bits of a float32
SUBNORMAL = 2.0**-24  # smallest float16
MAX_COMPARED_BOUNDS = 64  # up to this number, comparing with each bound is faster than a binary search


@dataclass(frozen=True)
class Levels:
    """The values of a code before any scale, from ``lowest`` to ``highest``.

    Values are integers; or, with a ``table``, its entries; or, with ``mantissa`` bits, the values of a small float
    whose smallest normal number is ``normal``.
    """

    low: int  # a byte of codes that all have the first known value
    high: int  # a byte of codes that all have the second known value
    lowest: float
    highest: float
    table: tuple[float, ...] = ()  # all values, ascending
    mantissa: int = 0
    normal: float = 0.0
    at: tuple[float, float] | None = None  # values of these two bytes, if not the lowest and the highest value
    centred: bool = False  # codes have no zero point, so that level zero is the value zero
    span: tuple[int, int] | None = None  # bytes of a block that hold codes, if blocks also hold their scales
    block: int = 0  # bytes in such a block
    rows: tuple[int, int] = (0, 0)  # bytes before the blocks of rows, and with these blocks

    @property
    def end_values(self) -> tuple[float, float]:
        """The values of the codes in the bytes ``low`` and ``high``."""
        return self.at or (self.lowest, self.highest)

    @property
    def largest(self) -> float:
        """The largest magnitude of a value."""
        return max(abs(self.lowest), abs(self.highest))

    def in_blocks(self, block: int, span: tuple[int, int], rows: tuple[int, int] = (0, 0)) -> "Levels":
        """Return these levels for codes that fill bytes ``span`` of each block of ``block`` bytes."""
        return replace(self, block=block, span=span, rows=rows)

    @cached_property
    def number(self) -> int:
        """The number of values; approximate for floats."""
        return len(self.table) or int(self.highest - self.lowest) + 1

    @property
    def uniform_bits(self) -> int | None:
        """The bits of a code if all levels are equally far apart; None for tables, floats and three levels."""
        return None if self.table or self.mantissa or self.number == 3 else (self.number - 1).bit_length()

    @cached_property
    def centred_levels(self) -> "Levels":
        """These levels, for codes without zero points or offsets."""
        return replace(self, centred=True)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The numbers halfway between the entries of the table."""
        return tuple((below + above) / 2 for below, above in pairwise(self.table))

    @cached_property
    def _boundaries(self) -> Codes:
        """Codes that are the index of the nearest table entry."""
        return make_counts(torch.tensor(self.bounds))

    @cached_property
    def _entries(self) -> Codes:
        """Codes that count the table entries below a number."""
        return make_counts(self._values)

    @cached_property
    def _values(self) -> Tensor:
        return torch.tensor(self.table, dtype=torch.float32)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the level numbers nearest to ``codes``, float32 in units of a code; neighbours differ by one."""
        if self.table:
            return _count_below(codes, self._boundaries)
        if not self.mantissa:
            return codes.clamp(self.lowest, self.highest).round_()
        size = codes.abs().clamp_(max=self.highest)
        bits = size.clamp(min=self.normal).view(torch.int32)
        bits.add_(1 << self._shift - 1).bitwise_right_shift_(self._shift).sub_(self._first)
        below = size.clamp_(max=self.normal).mul_(2**self.mantissa / self.normal).round_()
        return below.add_(bits).copysign_(codes)

    def stored_numbers(self, codes: Tensor) -> Tensor:
        """Return the level numbers of stored ``codes``; a code that no quantizer writes is beyond the last level."""
        return self.numbers(codes) if self.table or self.mantissa else codes.round()

    def count_steps(self, codes: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the levels nearest to ``codes``, and how many levels ``stored`` codes are from these."""
        numbers = self.numbers(codes)
        return self.values(numbers), (numbers - self.stored_numbers(stored)).abs_()

    def values(self, numbers: Tensor) -> Tensor:
        """Return the values of the levels with these numbers, float32."""
        if self.table:
            return self._values.to(numbers.device).index_select(0, numbers.reshape(-1)).view(numbers.shape)
        if not self.mantissa:
            return numbers
        size = numbers.abs()
        normal = (size.int() + self._first - 2**self.mantissa).bitwise_left_shift_(self._shift).view(torch.float32)
        below = size * (self.normal / 2**self.mantissa)
        return torch.where(size < 2**self.mantissa, below, normal).copysign_(numbers)

    def nearest(self, codes: Tensor) -> Tensor:
        """Return the values of the levels nearest to ``codes``, float32; faster than ``values(numbers(codes))``."""
        if not self.mantissa:
            return self.values(self.numbers(codes))
        size = codes.abs().clamp_(max=self.highest)
        values = size.clamp(min=self.normal)
        values.view(torch.int32).add_(1 << self._shift - 1).bitwise_and_(-1 << self._shift)
        below = size.clamp_(max=self.normal).mul_(2**self.mantissa / self.normal).round_()
        below.mul_(self.normal / 2**self.mantissa).sub_(self.normal)  # 0 for normal numbers
        return values.add_(below).copysign_(codes)

    def room(self, codes: Tensor) -> Tensor:
        """Return how far ``codes``, float32, can be from the nearest level, in units of a code.

        This is half the spacing between levels; for codes beyond the first or the last level, the distance to it.
        """
        beyond = (codes - codes.clamp(self.lowest, self.highest)).abs_()
        if self.table:
            values = self._values.to(codes.device)
            above = _count_below(codes, self._entries).clamp_(1, len(values) - 1)
            half = (values.diff() / 2)[above - 1]
        elif self.mantissa:
            powers = codes.abs().clamp(self.normal, self.highest).view(torch.int32).bitwise_and(FLOAT32_EXPONENT)
            half = powers.view(torch.float32) * 2.0 ** -(self.mantissa + 1)
        else:
            half = torch.full_like(codes, 0.5)
        return torch.maximum(half, beyond)

    @property
    def _shift(self) -> int:
        return FLOAT32_MANTISSA - self.mantissa

    @cached_property
    def _first(self) -> int:
        """The bits of the smallest normal number, without the bits that are rounded away."""
        return int(torch.tensor(self.normal).view(torch.int32)) >> self._shift

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The range of numbers: from half a step below the lowest value to half a step above the highest."""
        if self.table:
            return (
                self.lowest - (self.table[1] - self.table[0]) / 2,
                self.highest + (self.table[-1] - self.table[-2]) / 2,
            )
        if not self.mantissa:
            return self.lowest - 0.5, self.highest + 0.5
        binade = 2.0 ** int(torch.tensor(self.highest).log2().floor())
        half = binade / 2 ** (self.mantissa + 1)
        return self.lowest - half, self.highest + half


def _count_below(numbers: Tensor, counts: Codes) -> Tensor:
    """Return how many bounds are below each number, int32."""
    bounds = counts.read[0]
    if numbers.device.type != "cpu" or len(bounds) > MAX_COMPARED_BOUNDS:
        return torch.bucketize(numbers, bounds.to(numbers.device), out_int32=True)
    row, unit = numbers.reshape(1, -1), torch.ones(1, 1)
    return find_codes(row, unit, counts, max(numbers.numel(), 1)).view(numbers.shape).int()


def make_float_codes(levels: Levels, round_by_torch: Round, sign: int, one_zero: bool = False) -> Codes:
    """Return the codes of small floats, ties to even, with the sign in bit ``sign``; ``one_zero``: zero has no sign."""
    min_exponent = int(log2(levels.normal))  # smallest exponent of normal numbers
    size = {"low": levels.lowest, "high": levels.highest, "mantissa": levels.mantissa, "min_exponent": min_exponent}
    return Codes(round_by_torch, CodesStruct(kind=CodeKind.FLOATS, sign=sign, one_zero=one_zero, **size))


def uniform(bits: int) -> Levels:
    """Return the levels of unsigned codes of this many bits, or of signed codes stored with an offset."""
    return Levels(0x00, 0xFF, 0.0, 2.0**bits - 1)


def signed_bytes(bits: int) -> Levels:
    """Return the levels of codes in two's complement, one per byte."""
    half = 1 << bits - 1
    return Levels(256 - half & 0xFF, half - 1, -float(half), half - 1.0)


def nibbles(values: Sequence[float]) -> Levels:
    """Return the levels of 4-bit codes with these values, two per byte."""
    table = tuple(sorted(set(map(float, values))))
    low, high = values.index(table[0]), values.index(table[-1])
    return Levels(0x11 * low, 0x11 * high, table[0], table[-1], table)


INT4 = Levels(0x88, 0x77, -8.0, 7.0)  # two's complement, two per byte
INT8 = signed_bytes(8)
TERNARY = Levels(0x00, 0xFF, -1.0, 1.0, at=(-1.0, 2.0))  # 2-bit codes stored with an offset; one code is unused
E2M1 = Levels(0xFF, 0x77, -6.0, 6.0, mantissa=1, normal=1.0)  # two per byte
E2M3 = Levels(0xFF, 0x00, -7.5, 7.5, mantissa=3, normal=1.0, at=(-7.5, 0.0))
E3M2 = Levels(0xFF, 0x00, -28.0, 28.0, mantissa=2, normal=0.25, at=(-28.0, 0.0))
E4M3 = Levels(0xFE, 0x7E, -448.0, 448.0, mantissa=3, normal=2.0**-6)
E5M2 = Levels(0xFB, 0x7B, -57344.0, 57344.0, mantissa=2, normal=2.0**-14)
OF_DTYPE = {
    "I8": INT8,
    "F8_E4M3": E4M3,
    "F8_E5M2": E5M2,
    "F8_E4M3FNUZ": Levels(0xFF, 0x7F, -240.0, 240.0, mantissa=3, normal=2.0**-7),
    "F8_E5M2FNUZ": Levels(0xFF, 0x7F, -57344.0, 57344.0, mantissa=2, normal=2.0**-15),
}


class ScaleSteps(NamedTuple):
    """Scales that are whole multiples of a step, so that they differ from good scales by up to half a step.

    ``shared`` consecutive groups have one step: their largest scale is ``scales`` steps and their largest minimum is
    ``minima`` steps. For groups that run across rows, the step is ``of_largest`` times the largest magnitude instead.
    """

    shared: int
    scales: int = 0
    minima: int = 0  # 0: no minima
    of_largest: float = 0.0


class Scaling(NamedTuple):
    """Factor and offset of codes: per element, (r, c), or per row, (r or 1, 1)."""

    unit: Tensor
    shift: Tensor | None = None  # None: no offset


def derive_scaling(levels: Levels, low: Tensor, high: Tensor) -> Scaling:
    """Derive factor and offset from the dequantized values of the two known codes, (r, c) each."""
    first, second = levels.end_values
    span = second - first
    unit = (high - low).div_(span)
    if not bool(unit.sum().isfinite()):  # far faster than to ask each number
        torch.where(unit.isinf(), high / span - low / span, unit, out=unit)  # where only the difference overflows
    return Scaling(unit, low - unit * first)


class CodeCells(NamedTuple):
    """The codes around each element of a chunk, (r, c) each."""

    nearest: Tensor  # float32: value of the nearest code
    width: Tensor  # float32: distance between the two codes around the element
    inside: Tensor  # bool: the nearest code is neither the first nor the last


def find_cells(levels: Levels, x: Tensor, scales: Scaling) -> CodeCells:
    """Find the codes around ``x``, (r, c) float32."""
    codes, numbers, values, inside = _place(levels, x, scales)
    first, last = _find_ends(levels, codes)
    beside = levels.values(torch.where(codes < values, numbers - 1, numbers + 1).clamp_(first, last))
    return CodeCells(_scale(values, scales), (beside - values).abs_().mul_(scales.unit.abs()), inside)


def find_nearest(levels: Levels, x: Tensor, scales: Scaling) -> tuple[Tensor, Tensor]:
    """Return ``nearest`` and ``inside`` of :func:`find_cells`, in half the time."""
    _, _, values, inside = _place(levels, x, scales)
    return _scale(values, scales), inside


def _place(levels: Levels, x: Tensor, scales: Scaling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``x`` in steps, the number and value of the nearest code, and whether that code is not at an end."""
    unit, shift = scales
    fixed = unit == 0
    codes = (x if shift is None else x - shift) * unit.reciprocal().masked_fill_(fixed, 0.0)
    numbers = levels.numbers(codes)
    first, last = _find_ends(levels, codes)
    return codes, numbers, levels.values(numbers), (numbers > first) & (numbers < last) & ~fixed


def _find_ends(levels: Levels, like: Tensor) -> tuple[int, int]:
    """Return the numbers of the first and the last code."""
    first, last = levels.numbers(like.new_tensor((levels.lowest, levels.highest))).tolist()
    return first, last


def _scale(values: Tensor, scales: Scaling) -> Tensor:
    nearest = values * scales.unit
    return nearest if scales.shift is None else nearest.add_(scales.shift)
