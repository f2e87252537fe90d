"""What a checkpoint is: named entries with a dtype and a shape, and the bytes of each on request."""

import errno
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.checkpoints.store import RemotePath
from quanterr.errors import CheckpointError, ResourceError
from quanterr.util import platform
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import count, display

# Bits of one element, by the dtype's name in a safetensors header.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Beyond these a header is damaged or hostile.
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 32
MAX_DIMENSION = 2**40
MAX_NAME = 4096  # characters

BEGINNING, SAMPLES, SAMPLED = 1 << 16, 16, 1 << 12  # bytes, blocks and bytes of a block that tell a file from another
RETRIES = 3  # a network file system may fail once and then recover


class StoredFile:
    """One file, read by position. It must not change while it is open: see :meth:`check_unchanged`."""

    is_certain = False  # that weights are what their names and shapes suggest: no sample is read to find that out

    def __init__(self, path: Path) -> None:
        """Open a regular file; a FIFO is refused instead of waited for.

        Raises:
            CheckpointError: missing, not a regular file, not readable; names nearby files.
            ResourceError: too many open files.
        """
        self.path = path
        try:
            self._fd = _opened(path)
        except OSError as error:
            raise cannot_open(path, error) from error
        except ValueError as error:
            raise CheckpointError(f"{display(str(path))}: not a file name") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{self}: not a regular file")
        self._identity, self._changed = _identity(status), status.st_ctime_ns
        self.size = status.st_size

    def __str__(self) -> str:
        return display(platform.with_slashes(str(self.path)))

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        done = 0
        while done < len(view):
            n = self._pread(view[done:], offset + done)
            if n == 0:
                self.check_unchanged()
                raise CheckpointError(f"{self}: ends at byte {offset + done}, while it is being read: truncated")
            done += n

    def _pread(self, view: memoryview, offset: int) -> int:
        for retry in range(RETRIES + 1):
            try:
                return platform.read_at(self._fd, view, offset)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ESTALE) or retry == RETRIES:
                    name = errno.errorcode.get(error.errno or 0, "?")
                    raise CheckpointError(f"{self}: read failed at byte {offset}: {name}") from error
                time.sleep(0.1 * 4**retry)
        raise AssertionError("unreachable")

    def read(self, offset: int, n: int) -> bytes:
        """``n`` bytes from ``offset``: for headers and other small things."""
        buffer = bytearray(n)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def will_need(self, offset: int, n: int) -> None:
        """Tell the kernel to fetch these bytes now; a hint, and no more."""
        platform.will_need(self._fd, offset, n)

    def check_unchanged(self) -> None:
        """Raise CheckpointError when the file is no longer the one that was opened, byte for byte."""
        try:
            now = os.fstat(self._fd)
        except OSError as error:  # a stale handle of a network file system
            raise cannot_open(self.path, error) from error
        if _identity(now) != self._identity:
            raise CheckpointError(
                f"{self}: changed while being read (size {self.size} → {now.st_size}); results discarded. "
                "Compare again when nothing writes to it"
            )

    @property
    def written(self) -> tuple[int, ...]:
        """Which file it is on its disk, when it was written and when that was last set, in nanoseconds."""
        _, inode, _, modified = self._identity
        return inode, modified, self._changed

    def digest(self) -> str | None:
        """SHA-256 of its beginning and of a few blocks in it; None of a file that would have to be fetched."""
        found = sha256(self.read(0, min(BEGINNING, self.size)))
        n = min(SAMPLED, self.size)
        for k in range(SAMPLES):
            found.update(self.read((self.size - n) * k // (SAMPLES - 1), n))
        return found.hexdigest()

    @property
    def tag(self) -> str | None:
        """What a store tells its version by; None of a file on this machine."""
        return None

    @property
    def descriptor(self) -> int:
        """The descriptor, for who reads the bytes without Python."""
        return self._fd

    def utf8_path(self) -> str:
        """A path of this file for libraries that know only names in UTF-8: where it has none, its descriptor's.

        Raises:
            CheckpointError: it has neither.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            if (path := platform.path_of_descriptor(self._fd)) is None:
                raise CheckpointError(f"{self}: the name is not Unicode; rename the file") from error
            return path
        return str(self.path)

    def probe(self) -> None:
        """Raise ResourceError when no more files can be opened: the reason why a library could not."""
        try:
            os.close(_opened(self.path))
        except OSError as error:
            raise cannot_open(self.path, error) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _opened(path: Path) -> int:
    descriptor = platform.opened(path)
    platform.raise_limit_of_files(descriptor)
    return descriptor


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def cannot_open(path: Path, error: OSError) -> CheckpointError | ResourceError:
    """The error of a file or folder that cannot be opened: says why, and which names are near."""
    name = display(str(path))
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return CheckpointError(f"{name}: no such file{_nearby(path)}")
        case errno.EACCES | errno.EPERM:
            return CheckpointError(f"{name}: permission denied")
        case errno.ELOOP:
            return CheckpointError(f"{name}: too many levels of symbolic links")
        case errno.ENXIO:
            return CheckpointError(f"{name}: not a regular file")
        case errno.EMFILE | errno.ENFILE:
            return ResourceError(f"{name}: too many open files; raise the limit with `ulimit -n`")
    return CheckpointError(f"{name}: {(error.strerror or str(error)).lower()}")


def _nearby(path: Path) -> str:
    """The nearest names in the same folder, as the end of a sentence."""
    from difflib import get_close_matches

    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; did you mean {', '.join(display(name) for name in near)}?" if near else ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor's header: ``nbytes`` bytes at ``offset`` of ``file``, C order, little endian.

    ``dtype`` is the name in a safetensors header, or that of a type of ggml that stores blocks of elements
    (ggml_types.BLOCKS). Where it is neither, ``unknown`` says so, and the elements cannot be read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: StoredFile = field(repr=False)
    offset: int
    nbytes: int
    unknown: str | None = None

    @property
    def n(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits of one element, of a dtype without blocks."""
        return DTYPE_BITS[self.dtype]

    def read(self) -> bytes:
        """All its bytes: for small tensors."""
        return self.file.read(self.offset, self.nbytes)

    def __str__(self) -> str:
        return f"{display(self.name)} ({self.dtype} {list(self.shape)})"


class Unread(NamedTuple):
    """A file of weights in the folder of a checkpoint that is none of its files."""

    name: str
    differing: tuple[str, ...] = ()  # its tensors that the checkpoint stores in another shape, or in another size


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Named entries in one or several files, found from headers alone.

    ``metadata`` is the files' ``__metadata__``, one dict a file; ``config`` what is stored with the
    weights as ``config.json`` and the like: hints, which are checked against the tensors. ``gguf`` is
    what a GGUF file says of its model. ``folder`` is where the files are; None of what is made on the fly.
    ``unread`` are files of weights in it that do not belong to the checkpoint.
    """

    path: str
    kind: str
    files: tuple[StoredFile, ...]
    entries: dict[str, Entry]
    metadata: tuple[dict[str, str], ...] = ()
    config: JsonObject = field(default_factory=dict)
    revision: str | None = None
    notes: tuple[str, ...] = ()
    gguf: GgufMetadata | None = None
    folder: Path | RemotePath | None = None
    unread: tuple[Unread, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def identity(self) -> JsonObject:
        """What copies of it have in common, and nothing else has: files and tensors."""
        entries = (f"{e.name} {e.dtype} {e.shape} {e.offset} {e.nbytes}" for e in self.entries.values())
        return {
            "files": [[file.path.name, file.size, file.tag] for file in self.files],
            "tensors": sha256("\n".join(entries).encode("utf-8", "surrogatepass")).hexdigest(),
        }

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file changed since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Close the files."""
        close_all(self.files)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_all(files: Iterable[StoredFile]) -> None:
    """Close every file."""
    for file in files:
        file.close()


def refuse(message: str, lenient: bool, notes: list[str]) -> None:
    """Raise CheckpointError about what other readers may accept; where ``lenient``, note it and go on."""
    if not lenient:
        raise CheckpointError(f"{message}. --lenient accepts it")
    notes.append(message)


def check_lengths(entries: Iterable[Entry], lenient: bool, notes: list[str]) -> None:
    """Refuse names that no model has."""
    for entry in entries:
        if len(entry.name) > MAX_NAME:
            description = f"name of {len(entry.name)} characters; the limit is {MAX_NAME}"
            refuse(f"{entry.file}: {display(entry.name)}: {description}", lenient, notes)


def truncated(file: StoredFile, entries: Iterable[Entry], affected: str) -> CheckpointError:
    """The error of a file that is shorter than its tensors; ``affected`` is the first of them that is not whole."""
    needed = max(entry.offset + entry.nbytes for entry in entries)
    missing = f"{count(needed - file.size, 'byte')} missing (have {file.size:,}, need {needed:,})"
    return CheckpointError(f"{file}: truncated: {missing}; first affected: {affected}")
