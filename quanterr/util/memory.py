"""Lack of memory, which is checked before it can end the process, and recognized in the errors of all libraries."""

import importlib
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from quanterr.errors import ResourceError
from quanterr.util.platform import allocate_pages, limit_of_memory
from quanterr.util.text import display, size

# Parts of the messages by which Python, the C library, C++ and torch report a lack of memory or threads.
MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",  # Windows
    "Cannot allocate memory",
    "can't start new thread",
    "failed to map segment",  # while loading a library
    "bad_alloc",
)
MIN_FREE_BYTES = 256 * 2**20  # what a small comparison needs besides torch
MAX_LOADING_SECONDS = 60  # maximum processor time for loading torch, which usually takes 2 to 4
BYTES_PER_THREAD = 10 * 2**20  # the usual stack of 8 MiB, and thread-local data


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of any kind means that the host or a device is out of memory."""
    kinds = isinstance(error, MemoryError) or _is_out_of_device_memory(error)
    return kinds or any(description in str(error) for description in MEMORY_MESSAGES)


def _is_out_of_device_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's


def name_lack_of_memory(error: BaseException, name: str) -> BaseException:
    """Convert an out-of-memory error to one that names the weight and the remedy; return other errors unchanged."""
    if _is_out_of_device_memory(error):
        return ResourceError(f"out of GPU memory at {display(name)}; try --device cpu")
    if is_out_of_memory(error):
        return ResourceError(f"out of memory at {display(name)}; more memory is needed than is available or allowed")
    return error


@contextmanager
def device_memory() -> Iterator[None]:
    """Raise ResourceError if a device runs out of memory within the context, in work that cannot be cut into pieces."""
    try:
        yield
    except RuntimeError as error:  # torch's error is one
        if not _is_out_of_device_memory(error):
            raise
        raise ResourceError(f"out of GPU memory ({display(str(error), 200)}); try --device cpu") from error


def require_memory(n_bytes: int) -> None:
    """Check that ``n_bytes`` can be allocated, before a library in Rust does so and would abort the process.

    Raises:
        MemoryError: there is too little memory.
    """
    try:
        allocate_pages(n_bytes).close()
    except OSError as error:
        raise MemoryError from error


def require_memory_for_threads(n: int) -> None:
    """Check that the address space has room for ``n`` threads, if it is limited.

    A thread without memory for its first objects does not report its start, so waiting for it hangs; without memory for
    thread-local data, the loader ends the process with status 127.

    Raises:
        OSError: there is too little room.
    """
    if limit_of_memory() is not None:
        mmap.mmap(-1, n * BYTES_PER_THREAD).close()


def require_memory_for_torch() -> None:
    """Try to load torch in a child process if the address space is limited (``ulimit -v``).

    A library that runs out of memory ends its process with any status; 1 would be mistaken for "a gate failed".

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
    """End this process, with status 0 if torch can be loaded and leaves ``MIN_FREE_BYTES``.

    Processor time is limited because an import without enough memory can loop forever.
    """
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (MAX_LOADING_SECONDS, MAX_LOADING_SECONDS))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        importlib.import_module("torch")
        mmap.mmap(-1, MIN_FREE_BYTES).close()
    except BaseException:  # the child must never return into the program
        os._exit(1)
    os._exit(0)
