"""This process: its memory, its command line and its rank in a distributed run."""

import importlib
import mmap
import os
import sys
from contextlib import suppress
from typing import NoReturn

from quanterr.errors import ResourceError, UsageError
from quanterr.util.addresses import strip_credentials
from quanterr.util.platform import limit_of_memory
from quanterr.util.processes import this_process
from quanterr.util.text import escape_surrogates, size

ROOM = 256 * 2**20  # bytes that a small comparison needs besides torch
LOADING = 60  # limit for loading torch, in seconds of processor time; it usually takes 2 to 4


def require_memory() -> None:
    """Try to load torch in a child process if the address space is limited (``ulimit -v``).

    A library that runs out of memory ends its process with any status; 1 would read as "a gate failed".

    Raises:
        ResourceError: the limit is too low to load torch.
    """
    limit = limit_of_memory()
    if limit is None or "torch" in sys.modules:
        return
    child = os.fork()
    if child == 0:
        _load_torch_and_leave()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise ResourceError(f"the limit of {size(limit)} (ulimit -v) is too low to load torch; raise it")


def _load_torch_and_leave() -> NoReturn:
    """End this process, with status 0 if torch can be loaded and leaves ``ROOM`` bytes.

    Processor time is limited because an import without enough memory can loop forever.
    """
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (LOADING, LOADING))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        importlib.import_module("torch")
        mmap.mmap(-1, ROOM).close()
    except BaseException:  # the child must never return into the program
        os._exit(1)
    os._exit(0)


def command_line() -> list[str]:
    """Return the words of the command line without credentials, for the report."""
    return ["quanterr", *(escape_surrogates(strip_credentials(word)) for word in sys.argv[1:])]


def is_other_rank() -> bool:
    """Return True in each process of a distributed run except rank 0, which alone prints and writes."""
    with suppress(UsageError):  # the run itself raises it
        return this_process().rank > 0
    return False
