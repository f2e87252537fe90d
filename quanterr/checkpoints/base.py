"""Checkpoints as data: named entries with dtype and shape, and the bytes of each on request."""

import errno
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec

from quanterr.checkpoints.gguf_metadata import GgufMetadata
from quanterr.checkpoints.store import RemotePath
from quanterr.errors import CheckpointError, ResourceError
from quanterr.util import platform
from quanterr.util.strict_json import JsonObject, as_object
from quanterr.util.text import count, display

# Dtype name in a safetensors header → bits per element.
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

RECIPE = "recipe"  # kind of a checkpoint that a recipe makes from another one, with the same names and orders

# A header that exceeds these is damaged or hostile.
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 32
MAX_DIMENSION = 2**40
MAX_NAME = 4096  # characters

# A digest covers the first bytes of a file, and some blocks that are evenly spread over it.
DIGEST_BEGINNING, DIGEST_BLOCKS, DIGEST_BLOCK_BYTES = 1 << 16, 16, 1 << 12
RETRIES = 3  # a network file system may fail temporarily


class CheckpointFile:
    """An open file that is read by position; :meth:`check_unchanged` finds out whether it has changed meanwhile."""

    descriptor = -1  # file descriptor for the compiled kernel; -1 for a remote file
    is_certain = False  # True: names and shapes alone identify the weights, so no samples are read to confirm them

    def __init__(self, path: Path) -> None:
        """Open a regular file; a FIFO is refused at once, as reading it could block.

        Raises:
            CheckpointError: the file is missing (the message suggests similar names), unreadable or not regular.
            ResourceError: too many files are open.
        """
        self.path = path
        try:
            self.descriptor = _open(path)
        except OSError as error:
            raise make_open_error(path, error) from error
        except ValueError as error:
            raise CheckpointError(f"{display(str(path))}: not a file name") from error
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.descriptor)
            raise CheckpointError(f"{self}: not a regular file")
        self._identity, self._changed = _identity(status), status.st_ctime_ns
        self.size = status.st_size

    def __str__(self) -> str:
        return display(platform.with_slashes(str(self.path)))

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            CheckpointError: the file ends too early, or reading fails.
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
                return platform.read_at(self.descriptor, view, offset)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ESTALE) or retry == RETRIES:
                    name = errno.errorcode.get(error.errno or 0, "?")
                    raise CheckpointError(f"{self}: read failed at byte {offset}: {name}") from error
                time.sleep(0.1 * 4**retry)
        raise AssertionError("unreachable")

    def read(self, offset: int, n: int) -> bytes:
        """Return ``n`` bytes from ``offset`` on, for headers and other small data."""
        buffer = bytearray(n)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def will_need(self, offset: int, n: int) -> None:
        """Tell the operating system that these bytes will be read soon."""
        platform.will_need(self.descriptor, offset, n)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file's inode, size or modification time has changed since it was opened."""
        try:
            now = os.fstat(self.descriptor)
        except OSError as error:  # a stale handle on a network file system
            raise make_open_error(self.path, error) from error
        if _identity(now) != self._identity:
            differs = f" (size {self.size} → {now.st_size})" if now.st_size != self.size else ""
            raise CheckpointError(
                f"{self}: changed while being read{differs}; results discarded. Compare again when nothing writes to it"
            )

    @property
    def timestamps(self) -> tuple[int, ...]:
        """The file's inode, its modification time and its status change time, in nanoseconds."""
        _, inode, _, modified = self._identity
        return inode, modified, self._changed

    def digest(self) -> str | None:
        """Return the SHA-256 of the file's beginning and a few blocks; None for a remote file."""
        checksum = sha256(self.read(0, min(DIGEST_BEGINNING, self.size)))
        n = min(DIGEST_BLOCK_BYTES, self.size)
        for k in range(DIGEST_BLOCKS):
            checksum.update(self.read((self.size - n) * k // (DIGEST_BLOCKS - 1), n))
        return checksum.hexdigest()

    @property
    def tag(self) -> str | None:
        """The tag by which a store identifies the file's version; None for a local file."""
        return None

    def utf8_path(self) -> str:
        """Return a UTF-8 path of this file for libraries that need one: its path, or the path of its descriptor.

        Raises:
            CheckpointError: neither path is UTF-8.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            if (path := platform.path_of_descriptor(self.descriptor)) is None:
                raise CheckpointError(f"{self}: the name is not Unicode; rename the file") from error
            return path
        return str(self.path)

    def probe(self) -> None:
        """Raise ResourceError if no more files can be opened, which explains the failure of a library."""
        try:
            os.close(_open(self.path))
        except OSError as error:
            raise make_open_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _open(path: Path) -> int:
    descriptor = platform.open_for_reading(path)
    platform.raise_limit_of_files(descriptor)
    return descriptor


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def make_open_error(path: Path, error: OSError) -> CheckpointError | ResourceError:
    """Return the error for a file or folder that cannot be opened, with the reason and similar names."""
    name = display(str(path))
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return CheckpointError(f"{name}: no such file{_suggest_names(path)}")
        case errno.EACCES | errno.EPERM:
            return CheckpointError(f"{name}: permission denied")
        case errno.ELOOP:
            return CheckpointError(f"{name}: too many levels of symbolic links")
        case errno.ENXIO:
            return CheckpointError(f"{name}: not a regular file")
        case errno.EMFILE | errno.ENFILE:
            return ResourceError(f"{name}: too many open files; raise the limit with `ulimit -n`")
    return CheckpointError(f"{name}: {(error.strerror or str(error)).lower()}")


def _suggest_names(path: Path) -> str:
    """Return the end of an error message that suggests similar names in the same folder; empty without any."""
    from difflib import get_close_matches

    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"; did you mean {', '.join(display(name) for name in near)}?" if near else ""


class Entry(msgspec.Struct, frozen=True, gc=False):  # small, and quick to make
    """The header of a stored tensor: ``nbytes`` bytes at ``offset`` of ``file``, in C order, little endian.

    ``dtype`` is the name in a safetensors header, or the name of a ggml type that stores blocks of elements
    (ggml_types.BLOCKS). For any other type, ``unknown`` describes it, and the elements cannot be read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: CheckpointFile
    offset: int
    nbytes: int
    unknown: str | None = None

    @property
    def n(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def bits(self) -> int:
        """The bits per element; raises KeyError for ggml blocks and unknown dtypes."""
        return DTYPE_BITS[self.dtype]

    def read(self) -> bytes:
        """Return all bytes of the tensor, which should be small."""
        return self.file.read(self.offset, self.nbytes)

    def __str__(self) -> str:
        return f"{display(self.name)} ({self.dtype} {list(self.shape)})"


class Unread(NamedTuple):
    """A file of weights in the checkpoint's folder that does not belong to the checkpoint."""

    name: str
    differing: tuple[str, ...] = ()  # tensors that the checkpoint stores in another shape or size


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: named entries in one or several files, from headers alone.

    ``metadata`` has the ``__metadata__`` of each file. ``config`` maps names of config files, such as ``config.json``,
    to their content, {} if that is no JSON object; the content is checked against the tensors. ``gguf`` is the
    metadata of a GGUF file. ``folder`` is the folder of the files; None for a checkpoint made on the fly. ``unread``
    lists files of weights in the folder that do not belong to the checkpoint. ``source`` is the checkpoint from which
    this one reads its entries under other names. ``modules`` are folders whose tensors have the folder in front of
    their names (modules.py).
    """

    path: str
    kind: str
    files: tuple[CheckpointFile, ...]
    entries: dict[str, Entry]
    metadata: tuple[dict[str, str], ...] = ()
    config: dict[str, JsonObject] = field(default_factory=dict)
    revision: str | None = None
    notes: tuple[str, ...] = ()
    gguf: GgufMetadata | None = None
    folder: Path | RemotePath | None = None
    unread: tuple[Unread, ...] = ()
    source: "Checkpoint | None" = None
    modules: tuple[str, ...] = ()

    @cached_property
    def model_config(self) -> JsonObject:
        """The content of config.json; for a multimodal model, keys of the language model replace those at the top."""
        main = self.config.get("config.json", {})
        return main | as_object(main.get("text_config")) | as_object(main.get("llm_config"))

    @property
    def nbytes(self) -> int:
        """The total bytes of all tensors, as they are stored."""
        return self.source.nbytes if self.source else sum(entry.nbytes for entry in self.entries.values())

    @property
    def identity(self) -> JsonObject:
        """The file names, sizes and tags, and a hash of all tensor headers; equal for copies of the same checkpoint."""
        entries = (f"{e.name} {e.dtype} {e.shape} {e.offset} {e.nbytes}" for e in self.entries.values())
        return {
            "files": [[file.path.name, file.size, file.tag] for file in self.files],
            "tensors": sha256("\n".join(entries).encode("utf-8", "surrogatepass")).hexdigest(),
        }

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Close all files."""
        close_all(self.files)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_all(files: Iterable[CheckpointFile]) -> None:
    """Close every file."""
    for file in files:
        file.close()


def refuse(message: str, lenient: bool, notes: list[str]) -> None:
    """Raise CheckpointError for a non-standard file, or add the message to the notes if ``lenient``."""
    if not lenient:
        raise CheckpointError(f"{message}. --lenient accepts it")
    notes.append(message)


def make_joined_error(file: CheckpointFile, begin: int, remedy: str) -> CheckpointError:
    """Return the error for a file in which another file follows the last tensor, from byte ``begin`` on."""
    return CheckpointError(
        f"{file}: another file begins at byte {begin:,}, after the last tensor: shards were joined, as cat joins them, "
        f"and loaders would read only the first. {remedy}, or cut them apart: head -c {begin} and tail -c +{begin + 1}"
    )


def check_lengths(entries: Iterable[Entry], lenient: bool, notes: list[str]) -> None:
    """Refuse names of more than :data:`MAX_NAME` characters, unless ``lenient``."""
    for entry in entries:
        if len(entry.name) > MAX_NAME:
            description = f"name of {len(entry.name)} characters; the limit is {MAX_NAME}"
            refuse(f"{entry.file}: {display(entry.name)}: {description}", lenient, notes)


def make_truncation_error(file: CheckpointFile, entries: Iterable[Entry], affected: str) -> CheckpointError:
    """Return the error for a file that ends before its tensors do; ``affected`` is the first incomplete tensor."""
    needed = max(entry.offset + entry.nbytes for entry in entries)
    missing = f"{count(needed - file.size, 'byte')} missing (have {file.size:,}, need {needed:,})"
    return CheckpointError(f"{file}: truncated: {missing}; first affected: {affected}")
