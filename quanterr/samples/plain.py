"""Samples with sound codes and scales, the usual case: the kernel measures them while it compares.

:func:`~quanterr.kernel.levels.measure_rounding`, :func:`~quanterr.kernel.levels.find_nearest` and
:func:`~quanterr.samples.good_scales.measure_losses` specify the numbers, which the kernel adds up in float64. Torch
examines any other sample more closely.
"""

import ctypes
from functools import cache, lru_cache
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from torch import Tensor

from quanterr.formats import Weight
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.kernel.decoder import Decoder, ElementType, decoder_of
from quanterr.kernel.levels import Levels, Scaling
from quanterr.kernel.structs import CodeKind, SampleStruct
from quanterr.metrics import share
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums, as_float
from quanterr.samples.codes import RUN, SMALL, sample_blocks
from quanterr.samples.conspicuous import count_run_cells
from quanterr.samples.good_scales import ZERO, list_multiples
from quanterr.samples.scales import ENOUGH, EVERY, GroupSums, add_loss, get_clipping_limit, get_lucky_share

MOST_GROUPS = SMALL  # groups of a sample, at most
LEAST, MOST = 2.0**-80, 2.0**100  # range of energies in which float32 squares are trusted
LANES = 16  # columns that the kernel takes at once
NEAREST = 2  # as in shared.h
ONE = 2  # as in samples.c


class PlainSample(NamedTuple):
    """A sample of a weight's rows, and the struct to which the kernel writes its results."""

    struct: SampleStruct
    levels: Levels
    n: int  # elements

    @property
    def scales(self) -> ScaleStatistics | None:
        """The statistics of the weight's scales; None unless the kernel read all and they are positive and finite."""
        found, n = self.struct, self.struct.scale_n
        low, high, total = found.scale_low, found.scale_high, found.scale_sum
        if not (n > 0 and low > 0 and isfinite(total)):
            return None
        low, high = share(low), share(high)
        return ScaleStatistics(n, 0, 0, 0, low if low == high else total / n, low, high)

    @property
    def one_zero(self) -> bool:
        """True if all groups share a zero point, as the kernel knows or has found."""
        return bool(self.struct.kind != CodeKind.SHIFTED or self.struct.zeros == ONE)

    def copy(self) -> "PlainSample":
        """Return this sample with a struct of its own."""
        return self._replace(struct=SampleStruct.from_buffer_copy(self.struct))

    def summarize(self, sums: Sums) -> Attainable | None:
        """Return the error that the stored scales allow; None if a code, a scale or the sums need a closer look.

        ``sums`` cover the whole weight.
        """
        found = self.struct
        if not found.plain or sums.exact:
            return None
        energies = (as_float(sums.x_sq), as_float(sums.e_sq)) if self.n == sums.n else (found.x_sq, found.e_sq)
        plain = summarize_plain(self.n, energies, found.steps_sq)
        if plain is None:
            return None
        if found.plain == NEAREST:
            names = ("e_sq", "best_sq", "clipped_sq", "clipped_x_sq", "beyond_sq", "clipped", "off")
            plain = plain._replace(rounding=None, **{name: getattr(found, name) for name in names})
        of_groups = GroupSums(found.group_x_sq, found.stored_sq, found.good_sq[0], found.worst_sq)
        return add_loss(plain, of_groups, found.scale_ratio, get_lucky_share(self.levels))


def prepare_sample(weight: Weight, rows: int) -> PlainSample | None:
    """Return a sample of ``rows`` rows for the kernel; None if the kernel cannot measure the error that scales allow.

    It can if a weight's codes are multiplied by a single scale, or by a scale for each row, block or group of columns;
    groups of columns may also have zero points or shifts.
    """
    levels, scale, decoder = weight.levels, weight.scale, decoder_of(weight.dequantize)
    if levels is None or decoder is None or weight.encoding == "cast" or weight.rotated:
        return None
    steps = weight.scale_steps
    run_cells = count_run_cells(weight) if steps and steps.of_largest else 0
    if steps and not run_cells:
        return None
    codes = _find_codes(levels, decoder)
    n_scales, cols = _count_stored_scales(weight, decoder), weight.matrix[1]
    if codes is None or (weight.block_size is not None and weight.matrix_rows):
        return None
    if weight.block_size is None and (n_scales not in (1, weight.matrix[0]) or decoder.group not in (0, cols)):
        return None
    found = _lay_out(levels, codes, weight.matrix, weight.block_size, n_scales, rows)
    if found is None:
        return None
    found = found.copy()
    found.struct.scale_n = 0 if scale is None else n_scales
    if steps:  # a file may declare runs of more groups than an int64 holds
        found.struct.run_cells, found.struct.run_groups = min(run_cells, weight.n), min(steps.shared, weight.n)
        found.struct.of_largest = steps.of_largest
    return found


def _count_stored_scales(weight: Weight, decoder: Decoder) -> int:
    """Return the number of scales that are multiplied with codes; 0 if unknown."""
    if weight.scale is not None:
        return weight.scale.n
    return decoder.stored.entry.n if decoder.stored else 0


def can_measure_values(weight: Weight) -> bool:
    """Return whether the kernel may be able to measure a sample of the weight if its values are given."""
    if weight.levels is None or weight.encoding == "cast":
        return False
    if weight.scale_steps and not weight.scale_steps.of_largest:
        return False
    if weight.needs_float64 or weight.branch:  # a branch shifts each element
        return False
    blocks = weight.block_size
    return blocks is None or (blocks[0] == 1 and not weight.matrix_rows and weight.matrix[1] % blocks[1] == 0)


def prepare_values(weight: Weight, rows: int, scales: Scaling) -> tuple[PlainSample, Scaling] | None:
    """Return a sample of ``rows`` rows whose values are given, and the factor and offset of each group.

    ``scales`` are those of the sample's elements. The results are (rows, groups across), or (1, 1) for a single scale.
    Return None if the kernel cannot measure the error that scales allow. It requires :func:`can_measure_values`.
    """
    levels, n_scales = weight.levels, _count_scales(weight, rows, scales.unit)
    if levels is None or not n_scales:
        return None
    width = weight.block_size[1] if weight.block_size else weight.matrix[1]
    groups = 1 if n_scales == 1 else rows, weight.matrix[1] // width
    unit, shift = (None if side is None else _take_one_each(side, groups) for side in scales)
    if unit is None or (shift is None and scales.shift is not None):
        return None
    if shift is not None and not bool((shift.abs() > ZERO * levels.largest * unit.abs()).any()):
        shift = None
    if shift is None and not levels.lowest < 0 < levels.highest:
        return None
    if shift is not None and (levels.table or levels.mantissa):
        return None
    codes = _Codes(_find_kind(levels, shift is not None), 0.0)
    found = _lay_out(levels, codes, weight.matrix, weight.block_size, n_scales, rows)
    return found and (found.copy(), Scaling(unit, shift))


def _count_scales(weight: Weight, rows: int, unit: Tensor) -> int:
    """Return how many rows of a weight, or of its groups, have scales of their own; 0 if that is unknown."""
    if weight.block_size:
        return weight.matrix[0]
    if weight.scale is not None and weight.scale.n < weight.matrix[0]:
        return int(weight.scale.n == 1)
    return weight.matrix[0] if len(unit) == rows else 0


def _take_one_each(side: Tensor, groups: tuple[int, int]) -> Tensor | None:
    """Return one number for each of (down, across) groups, float32; None if the numbers of a group differ.

    ``side`` has (r or 1, c or 1) numbers.
    """
    down, across = groups
    if side.shape[1] > 1:
        split = side.reshape(len(side), across, -1)
        side = split[:, :, 0]
        if not bool((split == split[:, :, :1]).all()):
            return None
    if down < len(side) and not bool((side == side[:1]).all()):
        return None
    return side[:down].float().expand(down, across).contiguous()


class _Codes(NamedTuple):
    """The codes that the kernel multiplies: their kind, and the offset that it adds to the values of their levels."""

    kind: CodeKind
    offset: float


def _find_codes(levels: Levels, decoder: Decoder) -> _Codes | None:
    """Return the codes of a decoder; None if they do not match the levels, or are not on both sides of zero."""
    low, high = levels.lowest, levels.highest
    if decoder.element == ElementType.TABLE and decoder.table is not None:
        low, high = _find_range(decoder.table)
    elif decoder.element not in (ElementType.I8, ElementType.E4M3):
        return None
    offset = low - levels.lowest
    if decoder.zero is not None or decoder.shift is not None:
        is_plain = not (levels.table or levels.mantissa or offset)
        return _Codes(CodeKind.SHIFTED, 0.0) if is_plain else None
    if not levels.lowest + offset < 0 < levels.highest + offset or high < levels.highest + offset:
        return None
    kind = _find_kind(levels, False)
    if kind != CodeKind.INTEGERS:
        return _Codes(kind, 0.0) if (low, high) == (levels.lowest, levels.highest) else None
    return _Codes(kind, offset)


def _find_kind(levels: Levels, is_shifted: bool) -> CodeKind:
    if is_shifted:
        return CodeKind.SHIFTED
    return CodeKind.LISTED if levels.table else CodeKind.FLOATS if levels.mantissa else CodeKind.INTEGERS


@lru_cache(maxsize=64)
def _find_range(table: Tensor) -> tuple[float, float]:
    """Return the lowest and the highest finite value of a table."""
    finite = table[table.isfinite()]
    return float(finite.min()), float(finite.max())


@lru_cache(maxsize=64)  # weights share their shapes
def _lay_out(
    levels: Levels, codes: _Codes, matrix: tuple[int, int], block: tuple[int, int] | None, scales: int, rows: int
) -> PlainSample | None:
    """Lay out the groups of a sample of ``rows`` rows; None if there are too many, or the kernel cannot sample them."""
    height, width = block or (1 if scales > 1 else matrix[0], matrix[1])
    is_apart = codes.kind in (CodeKind.LISTED, CodeKind.SHIFTED)
    if is_apart and (height > 1 or width % LANES):
        return None
    numbers = _list_numbers(levels)
    every = 1 if rows * matrix[1] <= ENOUGH else EVERY
    every_closely = 1 if (rows if rows == matrix[0] else RUN) * matrix[1] <= ENOUGH else EVERY  # torch thins out runs
    struct = SampleStruct(codes.kind, levels.mantissa, levels.lowest + codes.offset, levels.highest + codes.offset)
    struct.normal, (struct.below, struct.above) = levels.normal, (end + codes.offset for end in levels.ends)
    struct.multiples, struct.n_multiples = ctypes.addressof(numbers.multiples), len(numbers.multiples)
    struct.levels, struct.bounds = ctypes.addressof(numbers.levels), ctypes.addressof(numbers.bounds)
    struct.halves, struct.numbers = ctypes.addressof(numbers.halves), ctypes.addressof(numbers.numbers)
    struct.n_levels = len(levels.table)
    struct.lucky, struct.most = get_lucky_share(levels), get_clipping_limit(levels)
    struct.cols, struct.per_row = width, height == 1
    struct.every, struct.whole = every, rows == matrix[0] and every == 1
    struct.every_closely = every_closely if height == 1 or block else 0
    groups = -(-rows // every_closely) * (matrix[1] // width)
    if block is not None and height > 1:
        chunks = sample_blocks(matrix, block)
        cols = chunks[0].stop_col // width * width if chunks else 0
        if not cols:
            return None
        if (height, width) == (matrix[0], 1):
            struct.transposed, struct.cols = 1, height
        struct.height, struct.first_block = height, chunks[0].row
        struct.block_rows, struct.block_cols = chunks[-1].stop_row - chunks[0].row, cols
        groups = len(chunks) * (cols // width)
    return PlainSample(struct, levels, rows * matrix[1]) if 0 < groups <= MOST_GROUPS else None


class _Numbers(NamedTuple):
    """Arrays with the numbers of levels, to which structs point."""

    multiples: "ctypes.Array[ctypes.c_float]"  # scales to try, as multiples of the scale that clips nothing
    levels: "ctypes.Array[ctypes.c_float]"  # the values of a table; this and the next arrays have LANES more numbers
    bounds: "ctypes.Array[ctypes.c_float]"  # the bounds between these values
    halves: "ctypes.Array[ctypes.c_float]"  # half the distances between them
    numbers: "ctypes.Array[ctypes.c_float]"  # the numbers of the values, from 0 on


@cache
def _list_numbers(levels: Levels) -> _Numbers:
    halves = [(above - below) / 2 for below, above in pairwise(levels.table)]
    counted = tuple(map(float, range(len(levels.table))))
    of_table = (levels.table, inf), (levels.bounds, inf), (halves, halves[-1] if halves else inf), (counted, inf)
    padded = [(*numbers, *LANES * [last]) for numbers, last in of_table]
    return _Numbers(*((ctypes.c_float * len(numbers))(*numbers) for numbers in (list_multiples(levels), *padded)))


def summarize_plain(n: int, energies: tuple[float, float], steps_sq: float) -> Attainable | None:
    """Return the result for codes that are all the nearest; None if the sums may have lost digits.

    ``energies`` are Σx² and Σe²; ``steps_sq`` is Σe² in steps of the codes.
    """
    x_sq, e_sq = energies
    if not (LEAST <= x_sq <= MOST and e_sq <= MOST):
        return None
    return Attainable(n, x_sq, e_sq, e_sq, rounding=steps_sq / n if n else None)
