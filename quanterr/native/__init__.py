"""The compiled kernel: one pass over the codes of two weights, without the interpreter.

kernel.c, regions.c, rounding.c, samples.c and searches.c document the computation. build.py compiles them for each
instruction set when quanterr is installed, if there is a C compiler; without one, torch does everything.
"""

import ctypes
import os
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.metrics import PERCENTILES
from quanterr.metrics.sums import KEPT_ROWS
from quanterr.util.platform import LIBRARY
from quanterr.util.text import display

VARIABLE = "QUANTERR_KERNEL"
INSTRUCTION_SETS = ("base", "avx2", "avx512")  # indexed by the result of quanterr_instructions
VERSION = 29
RECORD = Path(__file__).parent / "kernel.txt"  # the commands that compiled the kernel, or the reason why it is missing
ROOM = 1 << 15  # bins in a table of counts
SUMS = ("x", "y", "e", "x_abs", "e_abs", "x_sq", "y_sq", "e_sq", "xy", "relative", "weighted_x_sq", "weighted_e_sq")
SUM_BYTES = 4 * 68  # bytes of a sum, a signed integer in units of 2^-1074
PLACES = 3  # runs of bytes that a fingerprint covers
DONE = 1
MOST_PARTS = 64  # most parts of a sample that the kernel can compare cells with
MOST_SEARCHED = 64  # most elements of a part whose scale the kernel can search for

Pair = tuple[int, int]
Addresses = Iterable[int]


class Matrix(NamedTuple):
    """A matrix: its address, the number of elements from one row to the next, and whether they are float64."""

    values: int
    stride: int
    wide: bool = False


class ElementType(IntEnum):
    """The way in which one element is stored in a row of codes."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    E4M3 = 4
    TABLE = 5  # a table gives the one or more elements of each byte
    Q8_0 = 6  # from here on, blocks of ggml
    Q4_K = 7
    Q6_K = 8
    Q4_0 = 9
    Q4_1 = 10
    Q5_0 = 11
    Q5_1 = 12
    Q2_K = 13
    Q3_K = 14
    Q5_K = 15
    IQ4_NL = 16
    IQ4_XS = 17
    MXFP4 = 18
    NVFP4 = 19
    IQ1_S = 20  # from here on, a table gives the levels of each index
    IQ1_M = 21
    IQ2_XXS = 22
    IQ2_XS = 23
    IQ2_S = 24
    IQ3_XXS = 25
    IQ3_S = 26


class Order(IntEnum):
    """The arrangement of codes in memory."""

    ROWS = 0  # consecutive
    WORDS_DOWN = 1  # (words of 32 bits, rows): GPTQ
    AWQ_WORDS = 2  # (cols, rows / 8 words), the 8 codes of 4 bits interleaved
    SHARED_BYTES = 3  # consecutive, but a byte holds codes of several rows


class SideStruct(ctypes.Structure):
    """The rows of one weight; see kernel.c."""

    _fields_ = (
        ("element", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("file", ctypes.c_int32),
        ("per_byte", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("words", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("shared_step", ctypes.c_int64),
        ("shared_rows", ctypes.c_int64),
        ("shifts", ctypes.c_uint8 * 8),
        ("largest_code", ctypes.c_int32),
        ("stored", ctypes.c_void_p),
        ("tile", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("scale_step", ctypes.c_int64),
        ("scale_height", ctypes.c_int64),
        ("scale_n", ctypes.c_int64),
        ("scale_offset", ctypes.c_int64),
        ("scale_rows", ctypes.c_int64),
        ("scale_file", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("scale_table", ctypes.c_void_p),
        ("nested", ctypes.c_void_p),
        ("nested_n", ctypes.c_int64),
        ("nested_first", ctypes.c_int64),
        ("nested_offset", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("zero_step", ctypes.c_int64),
        ("shift_step", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("columns", ctypes.c_void_p),
        ("rotation", ctypes.c_int64),
        ("unit", ctypes.c_double),
        ("values", ctypes.c_void_p),
        ("ends", ctypes.c_int32 * 3),
        ("has_ends", ctypes.c_int32),
        ("saturated", ctypes.c_int64),
        ("sampled", ctypes.c_void_p),
        ("sampled_n", ctypes.c_int64),
        ("sampled_at", ctypes.c_int64 * PLACES),
    )


class RunStruct(ctypes.Structure):
    """The settings of a comparison and its sums; see kernel.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("rows_at_once", ctypes.c_int64),
        ("precise", ctypes.c_int64),
        ("outlier", ctypes.c_double),
        ("normal", ctypes.c_double),
        ("importance", ctypes.c_void_p),
        ("importance_step", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("row_sums", ctypes.c_void_p),
        ("peaks", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("cell_rows", ctypes.c_int64),
        ("cell_windows", ctypes.c_int64),
        ("rows_above", ctypes.c_int64),
        ("histogram", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("first_bin", ctypes.c_int64),
        ("n_bins", ctypes.c_int64),
        ("zero_errors", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("nonfinite_x", ctypes.c_int64),
        ("nonfinite_y", ctypes.c_int64),
        ("x_zero", ctypes.c_int64),
        ("y_zero", ctypes.c_int64),
        ("zero_reference", ctypes.c_int64),
        ("outliers", ctypes.c_int64),
        ("relative_outliers", ctypes.c_int64),
        ("e_max", ctypes.c_double),
        ("e_min", ctypes.c_double),
        ("relative_max", ctypes.c_double),
        ("x_max", ctypes.c_double),
        ("cast_max", ctypes.c_double),
        ("places", ctypes.c_void_p),
        ("worst_row", ctypes.c_int64),
        ("worst_col", ctypes.c_int64),
        ("worst_x", ctypes.c_double),
        ("worst_y", ctypes.c_double),
        ("dead_rows", ctypes.c_int64),
        ("n_kept", ctypes.c_int64),
        ("kept_rows", ctypes.c_int64 * KEPT_ROWS),
        ("kept_x_sq", ctypes.c_double * KEPT_ROWS),
        ("kept_e_sq", ctypes.c_double * KEPT_ROWS),
        ("kept_e_max", ctypes.c_double * KEPT_ROWS),
        ("kept_zeroed", ctypes.c_int64 * KEPT_ROWS),
        ("ranks", ctypes.c_int64 * len(PERCENTILES)),
        ("rank_bins", ctypes.c_int64 * len(PERCENTILES)),
        ("sample", ctypes.c_void_p),
    )


class SampleStruct(ctypes.Structure):
    """The settings and results of a measurement of the stored scales in a sample of rows; see shared.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("mantissa", ctypes.c_int32),
        ("lowest", ctypes.c_float),
        ("highest", ctypes.c_float),
        ("normal", ctypes.c_float),
        ("below", ctypes.c_float),
        ("above", ctypes.c_float),
        ("levels", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("halves", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("n_levels", ctypes.c_int64),
        ("multiples", ctypes.c_void_p),
        ("n_multiples", ctypes.c_int64),
        ("lucky", ctypes.c_double),
        ("most", ctypes.c_double),
        ("cols", ctypes.c_int64),
        ("per_row", ctypes.c_int32),
        ("whole", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
        ("every", ctypes.c_int64),
        ("every_closely", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("first_block", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("block_values", ctypes.c_void_p),
        ("ordered", ctypes.c_void_p),
        ("near", ctypes.c_void_p),
        ("run_cells", ctypes.c_int64),
        ("run_groups", ctypes.c_int64),
        ("of_largest", ctypes.c_float),
        ("room", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("most_cols", ctypes.c_int64),
        ("zeros", ctypes.c_int32),
        ("plain", ctypes.c_int32),
        ("x_sq", ctypes.c_double),
        ("e_sq", ctypes.c_double),
        ("steps_sq", ctypes.c_double),
        ("best_sq", ctypes.c_double),
        ("clipped_sq", ctypes.c_double),
        ("clipped_x_sq", ctypes.c_double),
        ("beyond_sq", ctypes.c_double),
        ("clipped", ctypes.c_int64),
        ("off", ctypes.c_int64),
        ("group_x_sq", ctypes.c_double),
        ("stored_sq", ctypes.c_double),
        ("good_sq", ctypes.c_double * 2),
        ("worst_sq", ctypes.c_double),
        ("scale_ratio", ctypes.c_double),
        ("scale_n", ctypes.c_int64),
        ("scale_low", ctypes.c_double),
        ("scale_high", ctypes.c_double),
        ("scale_sum", ctypes.c_double),
    )


class SampledCodes(IntEnum):
    """The kind of codes in a sample; see samples.c."""

    INTEGERS = 0
    FLOATS = 1
    TABLE = 2
    SHIFTED = 3  # integers, with a zero point for each group


class NumbersStruct(ctypes.Structure):
    """Numbers to round, and the units of their groups; see rounding.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("multiply", ctypes.c_int32),
        ("packing", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
    )


class Packing(IntEnum):
    """An arrangement of codes in bytes; all but the first are for 4-bit codes."""

    BYTES = 0  # one code per byte
    LOW_FIRST = 1  # two codes per byte, the first in the low bits
    HIGH_FIRST = 2
    HALVES = 3  # the first half of a group of 32 in the low bits, the second half in the high bits


class CodeKind(IntEnum):
    """A rule for rounding a number to a code."""

    INTEGERS = 0  # ties to even
    TRUNCATED = 1
    AWAY = 2  # ties away from zero
    FLOATS = 3
    TABLE = 4


class CodesStruct(ctypes.Structure):
    """The codes that numbers are rounded to; see rounding.c."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        ("mantissa", ctypes.c_int32),
        ("least", ctypes.c_int32),
        ("sign", ctypes.c_int32),
        ("one_zero", ctypes.c_int32),
        ("bounds", ctypes.c_void_p),
        ("changes", ctypes.c_void_p),
        ("n_bounds", ctypes.c_int64),
    )


class FieldStruct(ctypes.Structure):
    """A field of ``bits`` bits of each code in a block, starting at bit ``shift`` and stored from byte ``at`` on.

    A byte holds the fields of 8 / ``bits`` codes, ``run`` codes apart, with the first code in its lowest bits.
    """

    _fields_ = tuple((name, ctypes.c_int32) for name in ("at", "bits", "shift", "run"))


class ScalePacking(IntEnum):
    """An arrangement of the integer scales and minima in a block of a K type."""

    SIGNED_BYTES = 0
    NIBBLES = 1  # a scale in the low bits, its minimum in the high bits
    SIX_BIT_PAIRS = 2  # 8 scales and 8 minima in 12 bytes
    SIX_BITS = 3  # 16 scales, with 32 added to each, in 12 bytes


class SuperblockStruct(ctypes.Structure):
    """The layout of a K type's blocks; see rounding.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("bytes", "parts", "low", "high", "most", "packing")),
        *((name, ctypes.c_int32) for name in ("scales_at", "units_at")),
        ("fields", FieldStruct * 2),
    )


class Kernel(NamedTuple):
    """A compiled kernel and its instruction set."""

    library: ctypes.CDLL
    instructions: str

    def compare(
        self, x: "ctypes.Array[SideStruct]", y: "ctypes.Array[SideStruct]", runs: "ctypes.Array[RunStruct]"
    ) -> bool:
        """Carry out comparisons without the interpreter lock; return False if a file could not be read to the end.

        The buffers of the first run hold the histograms and sums of all runs, one after another.
        """
        return int(self.library.quanterr_compare(x, y, runs, ctypes.c_int64(len(runs)))) == DONE

    def add_counts(self, to: int, counts: Sequence[int], places: Sequence[int], sizes: Sequence[int]) -> None:
        """Add int64 histograms at the addresses ``counts`` to the one at ``to``, each starting at its place there."""
        many = len(counts)
        arrays = (ctypes.c_void_p * many)(*counts), *((ctypes.c_int64 * many)(*each) for each in (places, sizes))
        self.library.quanterr_add_counts(ctypes.c_void_p(to), *arrays, ctypes.c_int64(many))

    def stands_out(self, peaks: int, shape: Pair, parts: Sequence[int], least: float, most: float) -> bool:
        """Return whether a cell's largest error stands out against those in a sample.

        ``peaks`` is the address of (2, down, across) float32 numbers, for cells of ``shape``. ``parts`` holds the first
        row of each part of the sample, its stop row, its first column and its stop column. kernel.c has the rule.
        """
        numbers = (ctypes.c_int64 * len(parts))(*parts)
        sizes = map(ctypes.c_int64, shape)
        limits = ctypes.c_int64(len(parts) // 4), ctypes.c_double(least), ctypes.c_double(most)
        return bool(self.library.quanterr_stands_out(ctypes.c_void_p(peaks), *sizes, numbers, *limits))

    def decode(self, side: SideStruct, shape: tuple[int, int], rows_at_once: int) -> bool:
        """Decode (rows, cols) to ``side.values``; return False if a file could not be read."""
        sizes = map(ctypes.c_int64, (*shape, rows_at_once))
        return int(self.library.quanterr_decode(ctypes.byref(side), *sizes)) == DONE

    def measure(
        self, x: SideStruct, y: SideStruct, shape: tuple[int, int], rows_at_once: int
    ) -> tuple[float, float] | None:
        """Return Σx² and Σ(y - x)² of (rows, cols); None if a file could not be read."""
        found, sizes = (ctypes.c_double * 2)(), map(ctypes.c_int64, (*shape, rows_at_once))
        status = self.library.quanterr_measure(ctypes.byref(x), ctypes.byref(y), *sizes, found)
        return (found[0], found[1]) if status == DONE else None

    def round(self, numbers: NumbersStruct, codes: CodesStruct) -> None:
        """Find the codes of numbers in units of their groups, as tensors/rounding.py specifies."""
        self.library.quanterr_round(ctypes.byref(numbers), ctypes.byref(codes))

    def encode_superblocks(self, x: int, found: Pair, n: int, kind: SuperblockStruct, out: int) -> None:
        """Encode ``n`` blocks of 256 float32 numbers into ``out``, as recipes/superblocks.py specifies.

        ``found`` holds the addresses of the scales and of the minima of their parts, or 0 if there are no minima.
        """
        given = *map(ctypes.c_void_p, (x, *found)), ctypes.c_int64(n), ctypes.byref(kind)
        self.library.quanterr_encode_superblocks(*given, ctypes.c_void_p(out))

    def find_largest(self, x: int, shape: Pair, found: int) -> None:
        """Find the number of largest magnitude in each group, the first on a tie.

        ``x`` is the address of finite float32 numbers, (n, k), and ``found`` is the address of the results, (n,).
        """
        self.library.quanterr_find_largest(ctypes.c_void_p(x), *map(ctypes.c_int64, shape), ctypes.c_void_p(found))

    def find_magnitudes(self, x: int, n: int, size: int, found: int) -> None:
        """Find the largest magnitude in each group of ``size`` of ``n`` numbers, as tensors/rounding.py specifies."""
        sizes = map(ctypes.c_int64, (n, size))
        self.library.quanterr_find_magnitudes(ctypes.c_void_p(x), *sizes, ctypes.c_void_p(found))

    def rotate(self, values: int, groups: int, size: int, unit: float, room: int) -> None:
        """Multiply groups of ``size`` float32 values by a ConvRot matrix and by ``unit``, in place.

        ``values`` is their address, and ``room`` is the address of working memory for ``size`` float64 numbers;
        formats/shared/convrot.py specifies the operation.
        """
        group = ctypes.c_int64(groups), ctypes.c_int64(size), ctypes.c_double(unit)
        self.library.quanterr_rotate(ctypes.c_void_p(values), *group, ctypes.c_void_p(room))

    def multiply_sylvester(
        self, source: Matrix, out: Matrix, shape: Pair, block: tuple[int, bool], factors: Pair, room: int
    ) -> None:
        """Multiply blocks of a matrix of ``shape`` by Sylvester's matrix, and its rows and columns by float64 factors.

        ``block`` is the size of a block, a power of two, and whether it counts rows. ``factors`` holds the addresses of
        the rows' factors and the columns' factors, and ``room`` is the address of working memory for size · 16 float64
        numbers; formats/shared/hadamard.py specifies the operation.
        """
        read = ctypes.c_void_p(source.values), ctypes.c_int32(source.wide), ctypes.c_int64(source.stride)
        written = ctypes.c_void_p(out.values), ctypes.c_int64(out.stride)
        sizes = *map(ctypes.c_int64, (*shape, block[0])), ctypes.c_int32(block[1])
        self.library.quanterr_sylvester(*read, *written, *sizes, *map(ctypes.c_void_p, (*factors, room)))

    def rotate_sides(self, x: int, cols: int, unit: float, factors: Pair, out: Matrix, room: int) -> bool:
        """Rotate both sides of 128 rows of float32 numbers; return False if the instruction set cannot.

        ``factors`` holds the addresses of the columns' factors and the rows' factors, and ``room`` is the address of
        working memory for 128 · 128 numbers, all float32; formats/exl3.py specifies the operation.
        """
        if not hasattr(self.library, "quanterr_rotate_sides"):
            return False
        of_columns, of_rows = map(ctypes.c_void_p, factors)
        given = ctypes.c_void_p(x), ctypes.c_int64(cols), ctypes.c_float(unit), of_columns, of_rows
        written = ctypes.c_void_p(out.values), ctypes.c_int64(out.stride)
        self.library.quanterr_rotate_sides(*given, *written, ctypes.c_void_p(room))
        return True

    def find_mean_squares(self, x: int, shape: Pair, found: int) -> None:
        """Find the mean square of each part, (n, k) float32, as recipes/searches.py specifies."""
        sizes = ctypes.c_int64(shape[0]), ctypes.c_int32(shape[1])
        self.library.quanterr_find_mean_squares(ctypes.c_void_p(x), *sizes, ctypes.c_void_p(found))

    def search_minimum(
        self, x: Addresses, shape: Pair, ends: Pair, numerators: Sequence[float], absolute: bool, out: Addresses
    ) -> None:
        """Search for the scale and minimum of each part, (n, k) float32, for codes from 0 to the last of ``ends``.

        ``x`` holds the addresses of the parts, of the weights of their errors, and of floors, which are added to |x| if
        no weights are given; ``out`` holds the addresses of scales, minima and codes. An address of 0 means none. Each
        of ``numerators`` gives an inverse scale to try; recipes/searches.py specifies the search.
        """
        given = *map(ctypes.c_void_p, x), *_describe_parts(shape, ends), *_describe_steps(numerators)
        self.library.quanterr_search_minimum(*given, ctypes.c_int32(absolute), *map(ctypes.c_void_p, out))

    def search_symmetric(
        self, x: Addresses, shape: Pair, ends: Pair, numerators: Sequence[float], out: Addresses
    ) -> None:
        """Search for the scale of each part, like :meth:`search_minimum` but without a minimum or floors."""
        given = *map(ctypes.c_void_p, x), *_describe_parts(shape, ends), *_describe_steps(numerators)
        self.library.quanterr_search_symmetric(*given, *map(ctypes.c_void_p, out))

    def refine(self, x: Addresses, shape: Pair, ends: Pair, codes: Addresses) -> None:
        """Refine the codes of parts, (n, k) float32, in place and between ``ends``, and set their scales, (n,).

        ``codes`` holds the addresses of codes and scales. If the codes' address is 0, the codes that the largest
        elements give are refined, and none are returned.
        """
        given = *map(ctypes.c_void_p, x), *_describe_parts(shape, ends)
        self.library.quanterr_refine(*given, *map(ctypes.c_void_p, codes))

    def sum_regions(self, given: Addresses, shape: Pair, out: Addresses) -> bool:
        """Sum products of a sample, (r, c), over rows, columns and tiles; return False if an element is not finite.

        ``given`` holds the addresses of the original, stored and nearest values and of steps, float32, and of whether
        elements are outside; ``out`` those of the sums, float64; native/regions.c describes them.
        """
        sizes = map(ctypes.c_int64, shape)
        return bool(self.library.quanterr_sum_regions(*map(ctypes.c_void_p, given), *sizes, *map(ctypes.c_void_p, out)))

    def measure_sample(
        self, sample: SampleStruct, values: Pair, shape: Pair, scales: Addresses, step: int, largest: float
    ) -> None:
        """Measure the stored scales of a sample, (n, k) float32.

        ``values`` holds the addresses of both sides. ``scales`` holds those of a scale and a shift for each group, and
        of how much a scale may differ from a good one; 0 means none. Those of the next row are ``step`` numbers further
        on. ``largest`` is the original's largest magnitude.
        """
        given = *map(ctypes.c_void_p, values), *map(ctypes.c_int64, shape), *map(ctypes.c_void_p, scales)
        self.library.quanterr_measure_sample(
            ctypes.byref(sample), *given, ctypes.c_int64(step), ctypes.c_double(largest)
        )

    def look_up_tiles(
        self, stored: int, n: Pair, steps: Pair, codes: int, shape: Pair, mask: int, table: int, out: int
    ) -> None:
        """Look up the codes of ``n`` (rows, columns) tiles in a float32 table of ``mask`` + 1 values.

        ``steps`` counts the words from one row of tiles to the next, and from one column of tiles to the next;
        ``shape`` is (height, width) of a tile. ``stored``, ``codes``, ``table`` and ``out`` are addresses of what
        formats/shared/code_tiles.py specifies.
        """
        words = ctypes.c_void_p(stored), *map(ctypes.c_int64, (*n, *steps)), ctypes.c_void_p(codes)
        values = ctypes.c_uint32(mask), ctypes.c_void_p(table), ctypes.c_void_p(out)
        self.library.quanterr_look_up_tiles(*words, *map(ctypes.c_int64, shape), *values)

    def generate_tiles(
        self, stored: int, n: Pair, steps: Pair, codes: int, shape: Pair, generator: Pair, out: int
    ) -> None:
        """Compute the values of 16-bit codes that :meth:`look_up_tiles` looks up; a tile has at most 256 codes."""
        words = ctypes.c_void_p(stored), *map(ctypes.c_int64, (*n, *steps)), ctypes.c_void_p(codes)
        values = *map(ctypes.c_uint32, generator), ctypes.c_void_p(out)
        self.library.quanterr_generate_tiles(*words, *map(ctypes.c_int64, shape), *values)


def _describe_parts(shape: Pair, ends: Pair) -> tuple[object, ...]:
    return ctypes.c_int64(shape[0]), ctypes.c_int32(shape[1]), *map(ctypes.c_float, ends)


def _describe_steps(numerators: Sequence[float]) -> tuple[object, ...]:
    return (ctypes.c_float * len(numerators))(*numerators), ctypes.c_int32(len(numerators))


class KernelChoice(NamedTuple):
    """The kernel of a run; None means torch, and ``reason`` says why."""

    kernel: Kernel | None
    reason: str = ""

    def __str__(self) -> str:
        return f"native ({self.kernel.instructions})" if self.kernel else "torch"


def choose_kernel() -> KernelChoice:
    """Return the kernel that the environment asks for, or else the best available.

    Raises:
        UsageError: the environment asks for a kernel that does not exist or was not built.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "torch", "native"):
        raise UsageError(f"{VARIABLE}={display(asked)}: choose torch or native")
    if asked == "torch":
        return KernelChoice(None, f"{VARIABLE} asks for it")
    choice = find_best()
    if asked and choice.kernel is None:
        raise UsageError(f"{VARIABLE}=native: {choice.reason}; install a C compiler, then quanterr again")
    return choice


@cache
def find_best() -> KernelChoice:
    """Return the compiled kernel with the widest instructions that this machine has."""
    base = load("base")
    if base.kernel is None:
        return base
    widest = int(base.kernel.library.quanterr_instructions())
    found = (load(name) for name in reversed(INSTRUCTION_SETS[: widest + 1]))
    return next(choice for choice in found if choice.kernel)


@cache
def load(instructions: str) -> KernelChoice:
    """Load the kernel compiled for an instruction set, without checking that the machine has it."""
    path = library_path(instructions)
    if not path.exists():
        return KernelChoice(None, "no kernel was compiled when quanterr was installed")
    try:
        library = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        return KernelChoice(None, f"the kernel cannot be loaded: {display(str(error))}")
    if not _has_same_layout(library):
        return KernelChoice(None, f"{display(str(path))} belongs to another version of quanterr")
    return KernelChoice(Kernel(library, instructions))


class _Field(ctypes.Structure):
    """A field of a struct, as the kernel reports it."""

    _fields_ = (("name", ctypes.c_char_p), ("at", ctypes.c_int64))


def _has_same_layout(library: ctypes.CDLL) -> bool:
    """Return whether the kernel's structs have the same layout as ours."""
    if not hasattr(library, "quanterr_fields"):
        return False
    own = {b"version": VERSION}
    for name, struct in (("Side", SideStruct), ("Run", RunStruct), ("Sample", SampleStruct)):
        own[name.encode()] = ctypes.sizeof(struct)
        own |= {f"{name}.{field}".encode(): getattr(struct, field).offset for field, *_ in struct._fields_}
    found = (_Field * len(own))()
    library.quanterr_fields.restype = ctypes.c_int64
    n = library.quanterr_fields(found, ctypes.c_int64(len(own)))
    return bool(n == len(own)) and {field.name: field.at for field in found} == own


def read_record() -> str:
    """Return the commands that compiled the kernel, or why there is none; empty if unknown."""
    try:
        return RECORD.read_text(encoding="utf-8")
    except OSError:
        return ""


def library_path(instructions: str, folder: Path = Path(__file__).parent) -> Path:
    """Return the path of the kernel for an instruction set."""
    return folder / f"kernel_{instructions}{LIBRARY}"
