"""Samples whose codes and scales are as they should be, the usual case: the kernel measures them while it compares.

:func:`~quanterr.tensors.levels.measure_rounding` and :func:`~quanterr.tensors.good_scales.measure_losses` specify the
numbers, which the kernel adds up in float64. Any other sample is examined more closely, by torch.
"""

import ctypes
from functools import cache, lru_cache
from math import isfinite
from typing import NamedTuple

from quanterr.comparison.attainable import SMALL, sample_blocks
from quanterr.comparison.scale_sampling import ENOUGH, EVERY, GroupSums, add_loss, get_lucky_share
from quanterr.formats import Weight
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums, as_float
from quanterr.native import SampleStruct
from quanterr.tensors.good_scales import list_multiples
from quanterr.tensors.levels import Levels

MOST_GROUPS = SMALL  # of a sample
LEAST, MOST = 2.0**-80, 2.0**100  # range of energies in which float32 squares are trusted


class PlainSample(NamedTuple):
    """A sample of a weight's rows, and where the kernel writes what it finds."""

    struct: SampleStruct
    levels: Levels
    n: int  # elements
    n_scales: int  # of the weight

    @property
    def scales(self) -> ScaleStatistics | None:
        """The statistics of the weight's scales; None unless the kernel has read them all, positive and finite."""
        found, n = self.struct, self.n_scales
        low, high, total = found.scale_low, found.scale_high, found.scale_sum
        if not (found.scale_n == n and low > 0 and isfinite(total)):
            return None
        return ScaleStatistics(n, 0, 0, 0, low if low == high else total / n, low, high)

    def summarize(self, sums: Sums) -> Attainable | None:
        """Return what the stored scales allow; None if a code, a scale or the sums need a closer look.

        ``sums`` cover the whole weight.
        """
        found = self.struct
        if not found.plain or sums.exact:
            return None
        energies = (as_float(sums.x_sq), as_float(sums.e_sq)) if self.n == sums.n else (found.x_sq, found.e_sq)
        plain = summarize_plain(self.n, energies, found.steps_sq)
        if plain is None:
            return None
        of_groups = GroupSums(found.group_x_sq, found.stored_sq, found.good_sq, found.worst_sq)
        return add_loss(plain, of_groups, found.scale_ratio, get_lucky_share(self.levels))


def prepare_sample(weight: Weight, rows: int) -> PlainSample | None:
    """Return a sample of ``rows`` rows for the kernel; None if it cannot measure what the weight's scales allow.

    It can if codes are only multiplied: by one scale, by a scale for each row, or by scales of blocks.
    """
    levels, scale = weight.levels, weight.scale
    if scale is None or levels is None or weight.encoding == "cast" or weight.rotated or weight.scale_steps:
        return None
    if levels.table or not levels.centred or not levels.lowest < 0 < levels.highest:
        return None
    if weight.block_size is None and (weight.unit is None or scale.n not in (1, weight.matrix[0])):
        return None
    if weight.block_size is not None and weight.matrix_rows:
        return None
    found = _lay_out(levels, weight.matrix, weight.block_size, scale.n, rows)
    return found and PlainSample(SampleStruct.from_buffer_copy(found.struct), levels, found.n, scale.n)


@lru_cache(maxsize=64)  # weights share their shapes
def _lay_out(
    levels: Levels, matrix: tuple[int, int], block: tuple[int, int] | None, scales: int, rows: int
) -> PlainSample | None:
    """Lay out the groups of a sample of ``rows`` rows; None if they are too many, or blocks that are not sampled."""
    height, width = block or (1 if scales > 1 else matrix[0], matrix[1])
    multiples = _list_multiples(levels)
    every = 1 if rows * matrix[1] <= ENOUGH else EVERY
    struct = SampleStruct(levels.mantissa, levels.lowest, levels.highest, levels.normal)
    struct.multiples, struct.n_multiples = ctypes.addressof(multiples), len(multiples)
    struct.cols, struct.per_row = width, height == 1
    struct.every, struct.whole = every, rows == matrix[0] and every == 1
    groups = -(-rows // every) * (matrix[1] // width)
    if block is not None and height > 1:
        chunks = sample_blocks(matrix, block)
        cols = chunks[0].stop_col // width * width if chunks else 0
        if not cols:
            return None
        struct.height, struct.first_block = height, chunks[0].row
        struct.block_rows, struct.block_cols = chunks[-1].stop_row - chunks[0].row, cols
        groups = len(chunks) * (cols // width)
    return PlainSample(struct, levels, rows * matrix[1], scales) if 0 < groups <= MOST_GROUPS else None


@cache
def _list_multiples(levels: Levels) -> "ctypes.Array[ctypes.c_float]":
    """Return the multiples of scales to try; structs point to them."""
    multiples = list_multiples(levels)
    return (ctypes.c_float * len(multiples))(*multiples)


def summarize_plain(n: int, energies: tuple[float, float], steps_sq: float) -> Attainable | None:
    """Return the result for codes that are all the nearest; None if the sums may have lost digits.

    ``energies`` are Σx² and Σe²; ``steps_sq`` is Σe² in steps of the codes.
    """
    x_sq, e_sq = energies
    if not (LEAST <= x_sq <= MOST and e_sq <= MOST):
        return None
    return Attainable(n, x_sq, e_sq, e_sq, rounding=steps_sq / n if n else None)
