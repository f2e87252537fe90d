"""Where systems differ: nothing outside this file asks whether it runs on Linux, macOS or Windows.

What is a hint or a safeguard is left out where a system has no such thing. What is needed is done in another way, with
the same result.
"""

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

WINDOWS = os.name == "nt"
LIBRARY = ".dll" if WINDOWS else ".so"  # macOS loads any name

# O_NONBLOCK: a FIFO is refused instead of waited for. O_BINARY: Windows would change line ends.
_READING = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _READING |= getattr(os, _flag, 0)

_MOST_FILES = 10_240  # open at a time: macOS allows no more
_SPARE_FILES = 32  # that torch and others may need to open besides ours
_MOST_BYTES = 1 << 30  # of one ReadFile, whose count has 32 bits
_END_OF_FILE = 38  # ERROR_HANDLE_EOF
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of mallopt(3)
_position = threading.Lock()


# ---- files ----


def opened(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: not a file name.
    """
    return os.open(path, _READING)


def raise_limit_of_files(descriptor: int) -> None:
    """Every shard of a checkpoint stays open: where descriptors come near the soft limit, it is raised."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and descriptor + _SPARE_FILES >= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read from ``offset`` on into ``view``; the number of bytes, which is 0 at the end of the file.

    Threads may read from one descriptor at the same time.

    Raises:
        OSError: it cannot be read.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    if WINDOWS:
        return _read_file(kernel_file(descriptor), view, offset)
    with _position:  # macOS before 11
        os.lseek(descriptor, offset, os.SEEK_SET)
        return FileIO(descriptor, closefd=False).readinto(view) or 0


class _Overlapped(ctypes.Structure):
    """OVERLAPPED of the Windows API: where to read."""

    _fields_ = (
        ("internal", ctypes.c_size_t * 2),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


def _read_file(handle: int, view: memoryview, offset: int) -> int:
    """ReadFile with an offset: it needs no position of the file, which threads and the compiled kernel share."""
    place = _Overlapped(low=offset & 0xFFFFFFFF, high=offset >> 32)
    room, n = (ctypes.c_char * len(view)).from_buffer(view), ctypes.c_uint32()
    windows: Any = ctypes
    read = windows.WinDLL("kernel32", use_last_error=True).ReadFile
    most = ctypes.c_uint32(min(len(view), _MOST_BYTES))
    if read(ctypes.c_void_p(handle), room, most, ctypes.byref(n), ctypes.byref(place)):
        return n.value
    if (error := windows.get_last_error()) == _END_OF_FILE:
        return 0
    raise windows.WinError(error)


def kernel_file(descriptor: int) -> int:
    """What the compiled kernel reads from: the descriptor, on Windows the handle, which has 32 bits; -1 stays."""
    if not WINDOWS or descriptor < 0:
        return descriptor
    import msvcrt

    return int(msvcrt.get_osfhandle(descriptor))  # type: ignore[attr-defined,unused-ignore]


def will_need(descriptor: int, offset: int, n: int) -> None:
    """Tell the system to fetch these bytes now; a hint, and no more."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, n, os.POSIX_FADV_WILLNEED)


def give_mode(descriptor: int, mode: int) -> None:
    """Permissions that no umask takes away; where there are none, nothing."""
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


def sync_folder(folder: Path) -> None:
    """Make sure that a new name is on the disk; Windows opens no folders, and journals names itself.

    Raises:
        OSError: it is not.
    """
    if WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- names ----


def with_slashes(path: str, separator: str = os.sep) -> str:
    """A path as reports have it, the same on every system."""
    return path if separator == "/" else path.replace(separator, "/")


def path_of_descriptor(descriptor: int) -> str | None:
    """A name of an open file in plain ASCII; None where there is no such thing."""
    return None if WINDOWS else f"/dev/fd/{descriptor}"


def is_closed_pipe(error: OSError) -> bool:
    """Whether nobody reads any more what was written to standard output."""
    return isinstance(error, BrokenPipeError) or (WINDOWS and error.errno == errno.EINVAL)


# ---- memory and cores ----


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_of_memory() -> int | None:
    """Bytes of address space that this process may have (``ulimit -v``); None without a limit."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def give_back_memory() -> None:
    """Let glibc return what it keeps: after much was freed that nothing will need again.

    The large tables of headers and names of 50,000 tensors would stay with it to the end.
    """
    if not WINDOWS and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory(up_to: int) -> None:
    """Let glibc keep what is freed, in blocks of ``up_to`` bytes, in one heap for all threads."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, up_to)
        libc.mallopt(_M_ARENA_MAX, 1)


def prefer_large_pages(pages: mmap.mmap) -> None:
    """Large pages are quicker to get; a hint, and no more."""
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
