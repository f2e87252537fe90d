"""The structs, functions and sizes of the kernel, as c/kernel.h declares them."""

import ctypes
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

HEADER = Path(__file__).parent / "c" / "kernel.h"
ENUMS = HEADER.with_name("enums.h")  # made from enums.py
# Declarations in the header without comments, such as "typedef struct { … } Name;" and "EXPORT type name(…);".
STRUCT = re.compile(r"typedef struct \{([^{}]*)\} (\w+);")
SUM = re.compile(r"\bSUM_(\w+),")
FUNCTION = re.compile(r"EXPORT (\w+) (quanterr_\w+)\(([^;]*)\);")
SIZE = re.compile(r"#define (\w+) +(\d+)\s")
DECLARATION = re.compile(r"(?:const )?(\w+) (.+)", re.DOTALL)
DECLARATOR = re.compile(r"(\*?)(\w+)(?:\[(\w+)\])?")  # star of a pointer, name, length of an array
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
    """Return the hash of the headers, which build.py compiles into the kernel."""
    return int(hashlib.sha256(HEADER.read_bytes() + ENUMS.read_bytes()).hexdigest()[:16], 16)


@cache
def _read_sizes() -> dict[str, int]:
    return {name: int(size) for name, size in SIZE.findall(_read())}


@cache
def _read_structs() -> dict[str, str]:
    return {name: body for body, name in STRUCT.findall(_read())}


def read_fields(name: str, **structs: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Return the fields of a struct; ``structs`` are those that it contains, by name.

    Raises:
        ValueError: the header has a declaration in a form that its first comment does not allow.
    """
    known = SCALARS | structs
    declarations = filter(None, map(str.strip, _read_structs()[name].split(";")))
    return [field for declaration in declarations for field in _read_declaration(declaration, known)]


def _read_declaration(declaration: str, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    type_name, names = _match(DECLARATION, declaration).groups()
    for text in names.split(","):
        star, name, length = _match(DECLARATOR, text.strip()).groups()
        if not star and known.get(type_name) is None:
            raise ValueError(f"{HEADER}: {declaration!r}: {type_name} is not known")
        field_type = ctypes.c_void_p if star else known[type_name]
        if length:
            field_type *= int(length) if length.isdigit() else _read_sizes()[length]
        yield name, field_type


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{HEADER}: {text!r} is not a declaration in a form that this module reads")
    return match


def declare_functions(library: ctypes.CDLL) -> None:
    """Give each function of a library its types; functions that its instruction set lacks are skipped."""
    for result, name, arguments in FUNCTION.findall(_read()):
        if hasattr(library, name):
            function = getattr(library, name)
            texts = arguments.split(",") if arguments != "void" else ()
            parameters = [(argument, _match(DECLARATION, argument.strip())[1]) for argument in texts]
            types = [ctypes.c_void_p if "*" in argument else SCALARS[type_name] for argument, type_name in parameters]
            function.restype, function.argtypes = SCALARS[result], types


ROOM = _read_sizes()["ROOM"]
PLACES = _read_sizes()["PLACES"]
TILE = _read_sizes()["TILE"]
MAX_PARTS = _read_sizes()["MAX_PARTS"]
MAX_PART_ELEMENTS = _read_sizes()["MAX_PART_ELEMENTS"]
DONE = _read_sizes()["DONE"]
SUMS = tuple(map(str.lower, SUM.findall(_read())))
SUM_BYTES = 4 * _read_sizes()["LIMBS"]


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
    """Decoded rows of both sides, and the scales of the quantized side."""

    _fields_ = read_fields("Rows")


class LimitsStruct(ctypes.Structure):
    """Thresholds of samples."""

    _fields_ = read_fields("Limits")


class SampleStruct(ctypes.Structure):
    """The settings and results of a measurement of the stored scales in a sample of rows."""

    _fields_ = read_fields("Sample")


class DoubtsStruct(ctypes.Structure):
    """The levels and scales of codes, and how far bounds between levels may be off."""

    _fields_ = read_fields("Doubts")


class NumbersStruct(ctypes.Structure):
    """Numbers to round, and the units of their groups."""

    _fields_ = read_fields("Numbers")


class CodesStruct(ctypes.Structure):
    """The codes that numbers are rounded to."""

    _fields_ = read_fields("Codes")
