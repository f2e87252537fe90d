"""The structs, functions and sizes of the kernel, read from c/kernel.h, which alone declares them."""

import ctypes
import hashlib
import re
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

HEADER = Path(__file__).parent / "c" / "kernel.h"
# Of the header without its comments: "typedef struct { … } Name;", "enum Name { … };", "EXPORT type name(…);".
STRUCT = re.compile(r"typedef struct \{([^{}]*)\} (\w+);")
ENUM = re.compile(r"enum (\w+) \{([^{}]*)\};")
FUNCTION = re.compile(r"EXPORT (\w+) (quanterr_\w+)\(([^;]*)\);")
SIZE = re.compile(r"#define (\w+) +(\d+)\s")
DECLARATION = re.compile(r"(?:const )?(\w+) (.+)", re.DOTALL)
DECLARED = re.compile(r"(\*?)(\w+)(?:\[(\w+)\])?")  # star of a pointer, name, length of an array
SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}


@cache
def _read() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)


def compute_hash() -> int:
    """Return the hash of the header, which build.py compiles into the kernel."""
    return int(hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16], 16)


@cache
def _read_sizes() -> dict[str, int]:
    return {name: int(size) for name, size in SIZE.findall(_read())}


@cache
def _read_structs() -> dict[str, str]:
    return {name: body for body, name in STRUCT.findall(_read())}


def read_enum(name: str) -> list[str]:
    """Return the members of an enum, from 0 on."""
    bodies = dict(ENUM.findall(_read()))
    return [member.strip() for member in bodies[name].split(",")]


def read_fields(name: str, **structs: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Return the fields of a struct; ``structs`` are those that it contains, by name.

    Raises:
        ValueError: the header's first comment does not allow a declaration.
    """
    known = SCALARS | structs
    declarations = filter(None, map(str.strip, _read_structs()[name].split(";")))
    return [field for declaration in declarations for field in _read_declaration(declaration, known)]


def _read_declaration(declaration: str, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    kind, names = _match(DECLARATION, declaration).groups()
    for text in names.split(","):
        star, name, length = _match(DECLARED, text.strip()).groups()
        if not star and known.get(kind) is None:
            raise ValueError(f"{HEADER}: {declaration!r}: {kind} is not known")
        one = ctypes.c_void_p if star else known[kind]
        if length:
            one *= int(length) if length.isdigit() else _read_sizes()[length]
        yield name, one


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ValueError(f"{HEADER}: {text!r} is not a declaration that is read")
    return found


def declare_functions(library: ctypes.CDLL) -> None:
    """Give each function of a library its types; one that its instruction set lacks stays missing."""
    for result, name, arguments in FUNCTION.findall(_read()):
        if hasattr(library, name):
            function = getattr(library, name)
            each = arguments.split(",") if arguments != "void" else ()
            kinds = [(argument, _match(DECLARATION, argument.strip())[1]) for argument in each]
            types = [ctypes.c_void_p if "*" in argument else SCALARS[kind] for argument, kind in kinds]
            function.restype, function.argtypes = SCALARS[result], types


ROOM = _read_sizes()["ROOM"]
PLACES = _read_sizes()["PLACES"]
TILE = _read_sizes()["TILE"]
MOST_PARTS = _read_sizes()["MOST_PARTS"]
MOST_SEARCHED = _read_sizes()["MOST_SEARCHED"]
DONE = _read_sizes()["DONE"]
SUMS = tuple(member.removeprefix("SUM_").lower() for member in read_enum("Sum")[:-1])
SUM_BYTES = 4 * _read_sizes()["LIMBS"]


class ElementType(IntEnum):
    """The way in which one element is stored in a row of codes."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    E4M3 = 4
    TABLE = 5
    BLOCKS = 6
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

    ROWS = 0
    WORDS_DOWN = 1
    AWQ_WORDS = 2
    SHARED_BYTES = 3


class CodeKind(IntEnum):
    """The values of codes, and how a number is rounded to one."""

    INTEGERS = 0
    TRUNCATED = 1
    AWAY = 2
    FLOATS = 3
    LISTED = 4
    SHIFTED = 5


class Packing(IntEnum):
    """An arrangement of codes in bytes."""

    BYTES = 0
    LOW_FIRST = 1
    HIGH_FIRST = 2
    HALVES = 3


class SampleState(IntEnum):
    """The state of knowledge about the codes of a sample."""

    UNSURE = 0
    ROUNDED = 1
    NEAREST = 2


class Zeros(IntEnum):
    """The similarity of zero points."""

    FRACTIONS = 0
    WHOLE = 1
    ONE = 2


class BitsStruct(ctypes.Structure):
    """Some bits of a number, for each run of codes, entry or part of a block."""

    _fields_ = read_fields("Bits")


class BlocksStruct(ctypes.Structure):
    """The layout of ggml's blocks."""

    _fields_ = read_fields("Blocks", Bits=BitsStruct)


class SideStruct(ctypes.Structure):
    """The rows of one weight, and how they are decoded."""

    _fields_ = read_fields("Side")


class RunStruct(ctypes.Structure):
    """A comparison: its settings, buffers and results."""

    _fields_ = read_fields("Run")


class RowsStruct(ctypes.Structure):
    """Rows of both sides that were decoded, and the scales of the quantized one."""

    _fields_ = read_fields("Rows")


class LimitsStruct(ctypes.Structure):
    """Thresholds of samples."""

    _fields_ = read_fields("Limits")


class SampleStruct(ctypes.Structure):
    """The settings and results of a measurement of the stored scales in a sample of rows."""

    _fields_ = read_fields("Sample")


class NumbersStruct(ctypes.Structure):
    """Numbers to round, and the units of their groups."""

    _fields_ = read_fields("Numbers")


class CodesStruct(ctypes.Structure):
    """The codes that numbers are rounded to."""

    _fields_ = read_fields("Codes")
