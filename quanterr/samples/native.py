"""Samples that the kernel measures, which it can if their codes and scales have no defects, as is usual.

:func:`~quanterr.samples.nearest.measure_rounding`, :func:`~quanterr.samples.nearest.find_nearest` and
:func:`~quanterr.samples.good_scales.measure_losses` specify the numbers, which the kernel adds up in float64. Any other
sample is measured with torch.
"""

import ctypes
from functools import cache, lru_cache
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.formats import Weight
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.kernel.decoder import Decoder, ElementType
from quanterr.kernel.enums import CodeKind, SampleState, Zeros
from quanterr.kernel.interpreter import decoder_of
from quanterr.kernel.levels import Levels, Scaling
from quanterr.kernel.library import Kernel
from quanterr.kernel.native_sums import KeptBlocks, KeptRows
from quanterr.kernel.structs import LimitsStruct, RowsStruct, SampleStruct
from quanterr.lazy_torch import Tensor, torch
from quanterr.metrics import share
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums, as_float
from quanterr.samples.codes import (
    BETTER_DB,
    COMPENSATED_DB,
    MIN_EXPLAINED_SHARE,
    MIN_REGION_ELEMENTS,
    MIN_SQUARED_COSINE,
    MIN_TILES,
    NEGLIGIBLE_SHARE,
    PART_DB,
    TILE_DB,
    may_trust,
)
from quanterr.samples.conspicuous_rows import count_run_cells
from quanterr.samples.good_scales import (
    MAX_ZERO_DIFFERENCE,
    MAX_ZERO_POINT,
    MAX_ZERO_VARIATION,
    MIN_LOSS_RATIO_OF_SCALES,
    MIN_NORMAL_MULTIPLE,
    list_multiples,
)
from quanterr.samples.nearest import HALF_STEP
from quanterr.samples.rows import MAX_COMPLETE_ELEMENTS, MAX_ROW_COLUMNS, RUN, sample_blocks
from quanterr.samples.scales import (
    CLIPPED_DB,
    GROUP_DB,
    LEVELS_OF_BYTE,
    MAX_SCALE_RATIO,
    MAX_UNTHINNED_ELEMENTS,
    MIN_ERROR_RATIO,
    ROW_STEP,
    GroupSums,
    add_loss,
    get_clipping_limit,
    get_lucky_share,
)
from quanterr.tensors.workspace import Workspace

MAX_GROUPS = MAX_COMPLETE_ELEMENTS  # maximum number of groups of a sample
LANES = 16  # number of columns that the kernel processes at once
GROUP, COLUMN = 9, 9  # float64 numbers of scratch space per group and per column of a sample
LIMIT_SHARE = 0.995  # the kernel's limits are slightly stricter, so that all doubtful regions are measured with torch
LIMITS = LimitsStruct(
    half_step=HALF_STEP,
    near=1.0001,  # float32 cannot distinguish these errors
    above_normal=MIN_NORMAL_MULTIPLE,
    some=MIN_LOSS_RATIO_OF_SCALES,
    far=MIN_ERROR_RATIO,
    group_db=GROUP_DB,
    clipped_db=CLIPPED_DB,
    wide=MAX_SCALE_RATIO,
    fits=0.6,  # more than 1 / WIDE, as rounding may leave half a step of the needed range unused
    moved=MAX_ZERO_VARIATION,
    fixed=MAX_ZERO_DIFFERENCE,
    floor=NEGLIGIBLE_SHARE,
    like=LIMIT_SHARE * MIN_EXPLAINED_SHARE,
    part=LIMIT_SHARE * 10 ** (PART_DB / 10),
    compensated=10 ** (COMPENSATED_DB / 10) / LIMIT_SHARE,
    better=LIMIT_SHARE * 10 ** (-BETTER_DB / 10),
    worse=LIMIT_SHARE * 10 ** (BETTER_DB / 10),
    apart=LIMIT_SHARE * 10 ** (TILE_DB / 10),
    unlike=MIN_SQUARED_COSINE / LIMIT_SHARE,
    min_elements=MIN_REGION_ELEMENTS,
    min_regions=MIN_TILES,
)


class PlainSample(NamedTuple):
    """A sample of a weight's rows, and the struct to which the kernel writes its results."""

    struct: SampleStruct
    levels: Levels
    n: int  # elements

    @property
    def scales(self) -> ScaleStatistics | None:
        """The statistics of the weight's scales; None unless it read all of them, and all are positive and finite."""
        struct, n = self.struct, self.struct.scale_n
        low, high, total = struct.scale_low, struct.scale_high, struct.scale_sum
        if not (n > 0 and low > 0 and isfinite(total)):
            return None
        low, high = share(low), share(high)
        return ScaleStatistics(n, 0, 0, 0, low if low == high else total / n, low, high)

    @property
    def one_zero(self) -> bool:
        """True if no group has a zero point, or if the kernel found that all groups have the same one."""
        return bool(self.struct.kind != CodeKind.SHIFTED or self.struct.zeros == Zeros.ONE)

    def list_blocks(self) -> KeptBlocks | None:
        """Return the blocks that the kernel must keep while it compares; None if no scales span rows."""
        struct = self.struct
        if not struct.block_rows:
            return None
        values = torch.empty(struct.block_rows * struct.block_cols)
        return KeptBlocks(values, struct.first_block, struct.block_rows, struct.block_cols, bool(struct.transposed))

    def measure_kept(
        self, kernel: Kernel, kept: KeptRows, matrix: tuple[int, int], sums: Sums, near: Tensor | None, room: Workspace
    ) -> None:
        """Measure rows of a weight, (rows, cols), that the kernel has kept, if the kernel decoded the codes.

        ``sums`` cover the whole weight. A scale may differ from a good one by ``near``, (r, groups across) float32.
        """
        side, (n, cols), struct = kept.side, matrix, self.struct
        if side is None or not side.scale or side.rotation or sums.nonfinite_original or sums.nonfinite_quantized:
            return
        width = 1 if struct.transposed else struct.cols
        if min(side.group, cols) != width or bool(side.zero or side.shift) != (struct.kind == CodeKind.SHIFTED):
            return
        rows = RowsStruct(*kept.addresses, n=n, cols=cols, factor=side.factor, columns=side.columns)
        rows.places = None if kept.places is None else kept.places.data_ptr()
        rows.scale, rows.scale_step, rows.scale_height = side.scale, side.scale_step, side.scale_height
        rows.zero, rows.zero_step, rows.shift, rows.shift_step = side.zero, side.zero_step, side.shift, side.shift_step
        rows.n_scales = 0 if side.scale_table else side.scale_n
        if kept.blocks:
            struct.block_values = kept.blocks.values.data_ptr()
        if side.columns or struct.transposed:
            struct.ordered = room.buffer("ordered", (2 * self.n + 3 * cols,), torch.float32).data_ptr()
        self._measure(kernel, rows, sums.x_max, near, room)

    def measure_values(
        self,
        kernel: Kernel,
        values: tuple[Tensor, Tensor],
        scales: Scaling,
        largest: float,
        near: Tensor | None,
        room: Workspace,
    ) -> None:
        """Measure sampled rows of both sides, (r, c) float32, with one number of ``scales`` for each group.

        ``largest`` is the original's largest magnitude, or 0 if unknown; ``near`` is as in :meth:`measure_kept`.
        """
        x, y = values
        rows = RowsStruct(x.data_ptr(), y.data_ptr(), n=x.shape[0], cols=x.shape[1], scale_height=1)
        rows.scale, rows.shift = (None if side is None else side.data_ptr() for side in scales)
        rows.scale_step = rows.shift_step = 0 if scales.unit.numel() == 1 else scales.unit.shape[1]
        self._measure(kernel, rows, largest, near, room)

    def _measure(self, kernel: Kernel, rows: RowsStruct, largest: float, near: Tensor | None, room: Workspace) -> None:
        rows.near = None if near is None else near.data_ptr()
        self.struct.room = room.buffer("groups", (MAX_GROUPS, GROUP), torch.float64).data_ptr()
        self.struct.columns = room.buffer("columns", (COLUMN, MAX_ROW_COLUMNS), torch.float64).data_ptr()
        self.struct.max_cols = MAX_ROW_COLUMNS
        kernel.library.quanterr_measure_sample(ctypes.byref(self.struct), ctypes.byref(rows), largest)

    def copy(self) -> "PlainSample":
        """Return the sample with a copy of its struct."""
        return PlainSample(SampleStruct.from_buffer_copy(self.struct), self.levels, self.n)

    def summarize(self, sums: Sums) -> Attainable | None:
        """Return the minimum error with the stored scales; None if a code, a scale or a sum must be checked with torch.

        ``sums`` cover the whole weight.
        """
        struct = self.struct
        if not struct.plain or sums.exact:
            return None
        x_sq, e_sq = (as_float(sums.x_sq), as_float(sums.e_sq)) if self.n == sums.n else (struct.x_sq, struct.e_sq)
        if not may_trust(x_sq, e_sq):
            return None
        plain = Attainable(self.n, x_sq, e_sq, e_sq, rounding=struct.steps_sq / self.n)
        if struct.plain == SampleState.NEAREST:
            names = ("e_sq", "best_sq", "clipped_sq", "clipped_x_sq", "beyond_sq", "clipped", "off")
            plain = replace(plain, rounding=None, **{name: getattr(struct, name) for name in names})
        of_groups = GroupSums(struct.group_x_sq, struct.stored_sq, struct.good_sq[0], struct.worst_sq)
        return add_loss(plain, of_groups, struct.scale_ratio, get_lucky_share(self.levels))


def prepare_sample(weight: Weight, rows: int) -> PlainSample | None:
    """Return a sample of ``rows`` rows for the kernel; None if the kernel cannot measure it.

    The kernel can if the weight's codes are multiplied by a single scale, or by a scale for each row, block or group of
    columns; groups of columns may also have zero points or shifts.
    """
    levels, scale, decoder = weight.levels, weight.scale, decoder_of(weight.dequantize)
    if levels is None or decoder is None or weight.encoding == "cast" or weight.rotated:
        return None
    steps = weight.scale_steps
    if steps and not (steps.of_largest and count_run_cells(weight)):
        return None
    codes = _find_codes(levels, decoder)
    scales = scale if scale is not None else decoder.stored.entry if decoder.stored else None
    n_scales, cols = 0 if scales is None else scales.n, weight.matrix[1]
    if codes is None or (weight.block_size is not None and weight.matrix_rows):
        return None
    if weight.block_size is None and (n_scales not in (1, weight.matrix[0]) or decoder.group not in (0, cols)):
        return None
    sample = _lay_out(levels, codes, weight.matrix, weight.block_size, n_scales, rows)
    if sample is None:
        return None
    sample = sample.copy()
    sample.struct.scale_n = 0 if scale is None else n_scales
    return sample


def can_measure_values(weight: Weight) -> bool:
    """Return whether the kernel may be able to measure a sample of the weight from its values."""
    if weight.levels is None or weight.encoding == "cast":
        return False
    if weight.scale_steps and not weight.scale_steps.of_largest:
        return False
    if weight.needs_float64 or weight.branch:  # a branch shifts each element
        return False
    blocks = weight.block_size
    return blocks is None or (blocks[0] == 1 and not weight.matrix_rows and weight.matrix[1] % blocks[1] == 0)


def prepare_values(weight: Weight, rows: int, scales: Scaling) -> tuple[PlainSample, Scaling] | None:
    """Return a sample of ``rows`` rows that is measured from its values, and the factor and offset of each group.

    ``scales`` has the scales of the sample's elements. The results are (rows, groups across), or (1, 1) for a single
    scale. The result is None if the kernel cannot measure the sample. :func:`can_measure_values` must be true.
    """
    levels, n_scales = weight.levels, _count_scales(weight, rows, scales.unit)
    if levels is None or not n_scales:
        return None
    width = weight.block_size[1] if weight.block_size else weight.matrix[1]
    groups = 1 if n_scales == 1 else rows, weight.matrix[1] // width
    unit, shift = (None if side is None else _take_one_each(side, groups) for side in scales)
    if unit is None or (shift is None and scales.shift is not None):
        return None
    if shift is not None and not bool((shift.abs() > MAX_ZERO_POINT * levels.largest * unit.abs()).any()):
        shift = None
    if shift is None and not levels.lowest < 0 < levels.highest:
        return None
    if shift is not None and (levels.table or levels.mantissa):
        return None
    codes = _Codes(_find_kind(levels, shift is not None), 0.0)
    sample = _lay_out(levels, codes, weight.matrix, weight.block_size, n_scales, rows)
    return sample and (sample.copy(), Scaling(unit, shift))


def _count_scales(weight: Weight, rows: int, unit: Tensor) -> int:
    """Return 1 if the weight has one scale, the number of its rows if rows or groups have their own, 0 if unknown."""
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
    """The codes that the kernel multiplies by scales: their kind, and the offset that it adds to the levels."""

    kind: CodeKind
    offset: float


def _find_codes(levels: Levels, decoder: Decoder) -> _Codes | None:
    """Return the codes of a decoder; None if they do not match the levels, or are only on one side of zero."""
    low, high = levels.lowest, levels.highest
    if decoder.levels:
        finite = [level for level in decoder.levels if isfinite(level)]
        low, high = min(finite), max(finite)
    elif decoder.element not in (ElementType.I8, ElementType.E4M3):
        return None
    offset = low - levels.lowest
    if decoder.zero is not None or decoder.shift is not None:
        is_plain = not (levels.table or levels.mantissa or offset)
        return _Codes(CodeKind.SHIFTED, 0.0) if is_plain else None
    if not levels.lowest + offset < 0 < levels.highest + offset or high < levels.highest + offset:
        return None
    code_kind = _find_kind(levels, False)
    if code_kind != CodeKind.INTEGERS:
        return _Codes(code_kind, 0.0) if (low, high) == (levels.lowest, levels.highest) else None
    return _Codes(code_kind, offset)


def _find_kind(levels: Levels, is_shifted: bool) -> CodeKind:
    if is_shifted:
        return CodeKind.SHIFTED
    return CodeKind.LISTED if levels.table else CodeKind.FLOATS if levels.mantissa else CodeKind.INTEGERS


@lru_cache(maxsize=64)
@lru_cache(maxsize=64)  # cached, as many weights have the same shapes
def _lay_out(
    levels: Levels, codes: _Codes, matrix: tuple[int, int], block: tuple[int, int] | None, scales: int, rows: int
) -> PlainSample | None:
    """Return a sample of ``rows`` rows with its groups; None if there are too many or the kernel cannot sample them."""
    height, width = block or (1 if scales > 1 else matrix[0], matrix[1])
    is_apart = codes.kind in (CodeKind.LISTED, CodeKind.SHIFTED)
    if is_apart and (height > 1 or width % LANES):
        return None
    numbers = _list_numbers(levels)
    every = 1 if rows * matrix[1] <= MAX_UNTHINNED_ELEMENTS else ROW_STEP
    # Torch uses only some rows of each run.
    every_closely = 1 if (rows if rows == matrix[0] else RUN) * matrix[1] <= MAX_UNTHINNED_ELEMENTS else ROW_STEP
    struct = SampleStruct(codes.kind, levels.mantissa, levels.lowest + codes.offset, levels.highest + codes.offset)
    struct.normal, (struct.below, struct.above) = levels.normal, (end + codes.offset for end in levels.ends)
    struct.multiples, struct.n_multiples = ctypes.addressof(numbers.multiples), len(numbers.multiples)
    struct.levels, struct.bounds = ctypes.addressof(numbers.levels), ctypes.addressof(numbers.bounds)
    struct.halves, struct.numbers = ctypes.addressof(numbers.halves), ctypes.addressof(numbers.numbers)
    struct.n_levels = len(levels.table)
    struct.limits = ctypes.addressof(LIMITS)
    struct.lucky, struct.max_ratio = get_lucky_share(levels), get_clipping_limit(levels)
    struct.never_clips = levels.number >= LEVELS_OF_BYTE
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
    return PlainSample(struct, levels, rows * matrix[1]) if 0 < groups <= MAX_GROUPS else None


class _Numbers(NamedTuple):
    """The arrays of numbers of levels to which structs point."""

    multiples: "ctypes.Array[ctypes.c_float]"  # scales to try, as multiples of the scale that clips nothing
    levels: "ctypes.Array[ctypes.c_float]"  # the values of a table; this and the next arrays have LANES more numbers
    bounds: "ctypes.Array[ctypes.c_float]"  # the bounds between these values
    halves: "ctypes.Array[ctypes.c_float]"  # half the distances between them
    numbers: "ctypes.Array[ctypes.c_float]"  # the index of each value, from 0 on


@cache
def _list_numbers(levels: Levels) -> _Numbers:
    halves = [(above - below) / 2 for below, above in pairwise(levels.table)]
    counted = tuple(map(float, range(len(levels.table))))
    of_table = (levels.table, inf), (levels.bounds, inf), (halves, halves[-1] if halves else inf), (counted, inf)
    padded = [(*numbers, *LANES * [last]) for numbers, last in of_table]
    return _Numbers(*((ctypes.c_float * len(numbers))(*numbers) for numbers in (list_multiples(levels), *padded)))
