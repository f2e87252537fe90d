"""Differences between Linux, macOS and Windows, so that no other module checks which system it runs on.

Hints and safeguards are skipped on systems without them; functions that are required have a substitute there.
"""

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

WINDOWS = os.name == "nt"
CPUS = Path("/proc/cpuinfo")
LIBRARY = ".dll" if WINDOWS else ".so"  # macOS loads libraries of any suffix

# O_NONBLOCK: opening a FIFO does not block. O_BINARY: Windows would translate line ends.
_READING = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _READING |= getattr(os, _flag, 0)

_MAX_FILES = 10_240  # maximum number of open files on macOS
_SPARE_FILES = 32  # number of descriptors for torch and other libraries
_MAX_READ_BYTES = 1 << 30  # maximum size of a call of ReadFile, whose count has 32 bits
_END_OF_FILE = 38  # ERROR_HANDLE_EOF of the Windows API
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
_position = threading.Lock()


# ---- files ----


def open_for_reading(path: str | os.PathLike[str]) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: ``path`` is not a valid file name.
    """
    return os.open(path, _READING)


def raise_limit_of_files(descriptor: int) -> None:
    """Raise the soft limit of open files if ``descriptor`` is near it, as every shard of a checkpoint stays open."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and descriptor + _SPARE_FILES >= soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read bytes at ``offset`` into ``view`` and return how many were read: 0 at the end of the file.

    Several threads may read from one descriptor at the same time.

    Raises:
        OSError: reading failed.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    if WINDOWS:
        return _read_file(kernel_file(descriptor), view, offset)
    with _position:  # macOS before 11 has no preadv
        os.lseek(descriptor, offset, os.SEEK_SET)
        return FileIO(descriptor, closefd=False).readinto(view) or 0


class _Overlapped(ctypes.Structure):
    """The OVERLAPPED structure of the Windows API, which holds the offset to read from."""

    _fields_ = (
        ("internal", ctypes.c_size_t * 2),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


def _read_file(handle: int, view: memoryview, offset: int) -> int:
    """Call ReadFile with an offset, as the file position is shared by threads and the compiled kernel."""
    place = _Overlapped(low=offset & 0xFFFFFFFF, high=offset >> 32)
    room, n = (ctypes.c_char * len(view)).from_buffer(view), ctypes.c_uint32()
    windows: Any = ctypes
    read = windows.WinDLL("kernel32", use_last_error=True).ReadFile
    length = ctypes.c_uint32(min(len(view), _MAX_READ_BYTES))
    if read(ctypes.c_void_p(handle), room, length, ctypes.byref(n), ctypes.byref(place)):
        return n.value
    if (error := windows.get_last_error()) == _END_OF_FILE:
        return 0
    raise windows.WinError(error)


def kernel_file(descriptor: int) -> int:
    """Return the file that the compiled kernel reads: the descriptor, on Windows its handle (32 bits); -1 stays -1."""
    if not WINDOWS or descriptor < 0:
        return descriptor
    import msvcrt

    return int(msvcrt.get_osfhandle(descriptor))  # type: ignore[attr-defined,unused-ignore]


def will_need(descriptor: int, offset: int, n: int) -> None:
    """Hint to the system that ``n`` bytes at ``offset`` will be read soon, unless they seem to be in memory already.

    The hint takes 15 us per MiB even if all pages are in memory, as the system looks up each; three samples take 3 us.
    """
    if hasattr(os, "posix_fadvise") and not all(_is_in_memory(descriptor, offset + at) for at in (0, n // 2, n - 1)):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, n, os.POSIX_FADV_WILLNEED)


def _is_in_memory(descriptor: int, offset: int) -> bool:
    """Return whether a byte can be read without waiting for a disk; False if that is unknown."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (AttributeError, OSError):  # the system is not Linux, or the file system does not support it
        return False


def give_mode(descriptor: int, mode: int) -> None:
    """Set a file's permissions regardless of the umask; do nothing on systems without them."""
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a new file name survives a crash; Windows journals names by itself.

    Raises:
        OSError: flushing failed.
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
    """Return a path with forward slashes, as reports show it on every system."""
    return path if separator == "/" else path.replace(separator, "/")


def path_of_descriptor(descriptor: int) -> str | None:
    """Return a path to an open file in plain ASCII (``/dev/fd/N``); None on Windows."""
    return None if WINDOWS else f"/dev/fd/{descriptor}"


def is_closed_pipe(error: OSError) -> bool:
    """Return whether a write failed because the reader closed the pipe."""
    return isinstance(error, BrokenPipeError) or (WINDOWS and error.errno == errno.EINVAL)


# ---- memory and cores ----


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_amd_cpu() -> bool:
    """Return whether AMD made the CPU; False if that is unknown."""
    with suppress(OSError), CPUS.open(encoding="utf-8") as file:
        return any("AuthenticAMD" in line for line in islice(file, 2))
    return False


def limit_of_memory() -> int | None:
    """Return the limit of this process's address space (``ulimit -v``) in bytes; None if there is none."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def give_back_memory() -> None:
    """Make glibc return freed memory to the system; call it after freeing much that will not be needed again.

    Otherwise, the process would keep, for example, the memory of headers and names of 50,000 tensors until it exits.
    """
    if not WINDOWS and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory(up_to: int, in_all: int) -> None:
    """Make glibc keep freed blocks of up to ``up_to`` bytes, at most ``in_all`` bytes, in one heap for all threads."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, up_to)
        libc.mallopt(_M_TRIM_THRESHOLD, in_all)  # free memory at the end of the heap is given back if it exceeds this
        libc.mallopt(_M_ARENA_MAX, 1)


def allocate_pages(n_bytes: int) -> mmap.mmap:
    """Return new memory, in huge pages if the system has them: they are faster to allocate.

    Raises:
        OSError: there is not enough memory.
    """
    if WINDOWS:
        return mmap.mmap(-1, n_bytes)
    pages = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
