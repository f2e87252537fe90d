"""The choice among the compiled kernels, one for each instruction set."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quanterr.errors import UsageError
from quanterr.kernel.structs import compute_hash, declare_functions
from quanterr.util.platform import LIBRARY
from quanterr.util.text import display

VARIABLE = "QUANTERR_KERNEL"
INSTRUCTION_SETS = ("base", "avx2", "avx512")  # indexed by the result of quanterr_instructions
RECORD = Path(__file__).parent / "kernel.txt"  # the commands that compiled the kernel, or the reason why it is missing


class Kernel(NamedTuple):
    """A compiled kernel and its instruction set; c/kernel.h declares the functions of ``library``."""

    library: ctypes.CDLL
    instructions: str


class KernelChoice(NamedTuple):
    """The kernel of a run; None means torch, for the given ``reason``."""

    kernel: Kernel | None
    reason: str = ""
    asked: bool = False  # whether the environment variable chose it

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
        return KernelChoice(None, f"{VARIABLE} asks for it", asked=True)
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
    loaded = (load(name) for name in reversed(INSTRUCTION_SETS[: widest + 1]))
    return next(choice for choice in loaded if choice.kernel)


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
    header = getattr(library, "quanterr_header", None)
    if header is not None:
        header.restype = ctypes.c_uint64
    if header is None or header() != compute_hash():
        return KernelChoice(None, f"{display(str(path))} belongs to another version of quanterr")
    declare_functions(library)
    return KernelChoice(Kernel(library, instructions))


def read_record() -> str:
    """Return the commands that compiled the kernel, or why there is none; empty if unknown."""
    try:
        return RECORD.read_text(encoding="utf-8")
    except OSError:
        return ""


def library_path(instructions: str, folder: Path = Path(__file__).parent) -> Path:
    """Return the path of the kernel for an instruction set."""
    return folder / f"kernel_{instructions}{LIBRARY}"
