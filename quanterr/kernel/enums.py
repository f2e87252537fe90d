"""The enumerations that Python and the kernel share; c/enums.h is made from this module."""

from enum import IntEnum


class ElementType(IntEnum):
    """The storage of an element in a row of codes."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    E4M3 = 4
    TABLE = 5  # a table gives the one or more elements of each byte
    BLOCKS = 6  # blocks whose layout is data (BlocksStruct)
    # The layouts of the following blocks are constants in c/blocks.h, for which the compiler specializes the code.
    Q8_0 = 7
    Q4_0 = 8
    Q4_1 = 9
    Q5_0 = 10
    Q5_1 = 11
    Q2_K = 12
    Q3_K = 13
    Q4_K = 14
    Q5_K = 15
    Q6_K = 16
    IQ4_NL = 17
    IQ4_XS = 18
    MXFP4 = 19
    NVFP4 = 20
    IQ1_S = 21
    IQ1_M = 22
    IQ2_XXS = 23
    IQ2_XS = 24
    IQ2_S = 25
    IQ3_XXS = 26
    IQ3_S = 27


class Order(IntEnum):
    """The arrangement of codes in memory."""

    ROWS = 0  # consecutive
    WORDS_DOWN = 1  # (words of 32 bits, rows): GPTQ
    AWQ_WORDS = 2  # (cols, rows / 8 words), the 8 codes of 4 bits interleaved
    SHARED_BYTES = 3  # consecutive, but a byte holds codes of several rows


class CodeKind(IntEnum):
    """The values of codes, and how numbers are rounded to them."""

    INTEGERS = 0  # ties to even
    TRUNCATED = 1
    AWAY = 2  # ties away from zero
    FLOATS = 3
    LISTED = 4  # the values are listed
    SHIFTED = 5  # integers, with a zero point for each group


class Packing(IntEnum):
    """An arrangement of codes in bytes."""

    BYTES = 0  # one code per byte
    LOW_FIRST = 1  # two codes of 4 bits per byte, the first in the low bits
    HIGH_FIRST = 2
    HALVES = 3  # of 32 codes of 4 bits, the first half in the low bits, the second half in the high bits


class SampleState(IntEnum):
    """What a first pass over a sample has shown about its codes."""

    UNSURE = 0  # nothing: the codes must be examined further
    ROUNDED = 1  # all errors are at most half a step
    NEAREST = 2  # errors are about as small as the format allows


class Zeros(IntEnum):
    """The zero points that groups may have."""

    FRACTIONS = 0  # any number
    WHOLE = 1  # whole numbers, like codes
    ONE = 2  # one number for all groups
