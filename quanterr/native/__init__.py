"""The compiled kernel: one pass over the codes of two weights, without the interpreter.

kernel.c says what it computes. It is compiled by build.py when quanterr is installed, where there is a C compiler, once
for each instruction set; where there is none, everything is done in torch.
"""

import ctypes
import os
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.metrics.sums import KEPT_ROWS
from quanterr.util.platform import LIBRARY
from quanterr.util.text import display

VARIABLE = "QUANTERR_KERNEL"
INSTRUCTION_SETS = ("base", "avx2", "avx512")  # as quanterr_instructions counts them
VERSION = 7
RECORD = Path(__file__).parent / "kernel.txt"  # how the kernel was compiled, or why it could not be
ROOM = 1 << 15  # bins of a table of counts
SUMS = ("x", "y", "e", "x_abs", "e_abs", "x_sq", "y_sq", "e_sq", "xy", "relative", "weighted_x_sq", "weighted_e_sq")
SUM_BYTES = 4 * 68  # of a sum, a signed integer in units of 2^-1074
DONE = 1


class Element(IntEnum):
    """How the codes of a row are stored."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    E4M3 = 4
    TABLE = 5  # a table says what each byte stands for: one element, or several
    Q8_0 = 6  # ggml's blocks
    Q4_K = 7
    Q6_K = 8


class Order(IntEnum):
    """Where the codes of a row are."""

    ROWS = 0  # one after the other
    WORDS_DOWN = 1  # (words of 32 bits, rows): GPTQ
    AWQ_WORDS = 2  # (cols, rows / 8 words), the 8 codes of 4 bits interleaved


class Side(ctypes.Structure):
    """The rows of one weight; see kernel.c."""

    _fields_ = (
        ("element", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("file", ctypes.c_int32),
        ("per_byte", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("words", ctypes.c_int64),
        ("stored", ctypes.c_void_p),
        ("tile", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("scale_step", ctypes.c_int64),
        ("zero_step", ctypes.c_int64),
        ("shift_step", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("ends", ctypes.c_int32 * 3),
        ("has_ends", ctypes.c_int32),
        ("saturated", ctypes.c_int64),
    )


class Run(ctypes.Structure):
    """What is added up, and the sums; see kernel.c."""

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
        ("worst_row", ctypes.c_int64),
        ("dead_rows", ctypes.c_int64),
        ("n_kept", ctypes.c_int64),
        ("kept_rows", ctypes.c_int64 * KEPT_ROWS),
        ("kept_x_sq", ctypes.c_double * KEPT_ROWS),
        ("kept_e_sq", ctypes.c_double * KEPT_ROWS),
        ("kept_e_max", ctypes.c_double * KEPT_ROWS),
        ("kept_zeroed", ctypes.c_int64 * KEPT_ROWS),
    )


class Kernel(NamedTuple):
    """A compiled kernel, and the instruction set that it was compiled for."""

    library: ctypes.CDLL
    instructions: str

    def compare(self, original: Side, quantized: Side, run: Run) -> bool:
        """Carry out ``run``, without the interpreter lock; False where a file could not be read to the end."""
        sides = ctypes.byref(original), ctypes.byref(quantized)
        return int(self.library.quanterr_compare(*sides, ctypes.byref(run))) == DONE

    def decode(self, side: Side, shape: tuple[int, int], rows_at_once: int) -> bool:
        """Put the values of (rows, cols) where ``side.values`` says; False where a file could not be read."""
        sizes = map(ctypes.c_int64, (*shape, rows_at_once))
        return int(self.library.quanterr_decode(ctypes.byref(side), *sizes)) == DONE

    def nearest(self, x: int, n: int, bounds: int, changes: int, n_bounds: int, first: int, codes: int) -> None:
        """Codes, uint8 (n,), of the numbers of a table that are nearest to ``x``, float32 (n,); all are addresses.

        ``first`` is the code up to the first of the ``bounds``, float32; beyond each it is another one, by exclusive or
        with ``changes``, int32.
        """
        of_x, of_table = (ctypes.c_void_p(x), ctypes.c_int64(n)), (ctypes.c_void_p(bounds), ctypes.c_void_p(changes))
        self.library.quanterr_nearest(*of_x, *of_table, n_bounds, first, ctypes.c_void_p(codes))


class Choice(NamedTuple):
    """The kernel of a run: None is torch's, and ``reason`` says why."""

    kernel: Kernel | None
    reason: str = ""

    def __str__(self) -> str:
        return f"native ({self.kernel.instructions})" if self.kernel else "torch"


def chosen() -> Choice:
    """The kernel that the environment asks for, or else the best there is.

    Raises:
        UsageError: it asks for one that does not exist, or that was not built.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "torch", "native"):
        raise UsageError(f"{VARIABLE}={display(asked)}: choose torch or native")
    if asked == "torch":
        return Choice(None, f"{VARIABLE} asks for it")
    choice = best()
    if asked and choice.kernel is None:
        raise UsageError(f"{VARIABLE}=native: {choice.reason}; install a C compiler, then quanterr again")
    return choice


@cache
def best() -> Choice:
    """The compiled kernel with the widest instructions that this machine has."""
    base = load("base")
    if base.kernel is None:
        return base
    widest = int(base.kernel.library.quanterr_instructions())
    found = (load(name) for name in reversed(INSTRUCTION_SETS[: widest + 1]))
    return next(choice for choice in found if choice.kernel)


@cache
def load(instructions: str) -> Choice:
    """The kernel that was compiled for an instruction set; whether the machine has it is not checked."""
    path = library_path(instructions)
    if not path.exists():
        return Choice(None, "no kernel was compiled when quanterr was installed")
    try:
        library = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        return Choice(None, f"the kernel cannot be loaded: {display(str(error))}")
    if not _has_same_layout(library):
        return Choice(None, f"{display(str(path))} is of another version of quanterr")
    return Choice(Kernel(library, instructions))


class _Field(ctypes.Structure):
    """What the kernel says of a field."""

    _fields_ = (("name", ctypes.c_char_p), ("at", ctypes.c_int64))


def _has_same_layout(library: ctypes.CDLL) -> bool:
    """Whether every field is where the kernel looks for it."""
    if not hasattr(library, "quanterr_fields"):
        return False
    own = {b"version": VERSION}
    for struct in (Side, Run):
        name = struct.__name__
        own[name.encode()] = ctypes.sizeof(struct)
        own |= {f"{name}.{field}".encode(): getattr(struct, field).offset for field, *_ in struct._fields_}
    found = (_Field * len(own))()
    library.quanterr_fields.restype = ctypes.c_int64
    n = library.quanterr_fields(found, ctypes.c_int64(len(own)))
    return bool(n == len(own)) and {field.name: field.at for field in found} == own


def record() -> str:
    """How the kernel was compiled, command by command, or why there is none; empty where that is not known."""
    try:
        return RECORD.read_text(encoding="utf-8")
    except OSError:
        return ""


def library_path(instructions: str, folder: Path = Path(__file__).parent) -> Path:
    """Where the kernel for an instruction set is."""
    return folder / f"kernel_{instructions}{LIBRARY}"
