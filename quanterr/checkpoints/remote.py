"""Files that are not on this machine, read by ranges; the stores that they are in: stores.py.

Headers and weights are read by ranges, in blocks that are fetched a few at a time and ahead of those who need them. A
few blocks are kept in memory, and on disk where block_cache.py is asked to. What the store says of a file's version
(its ETag, a commit of the hub) is sent with every range, so that a file that changes while it is read is an error.
Ranges that a server answers with other bytes than were asked for are errors too, or are asked for again.

Retried: 429, 5xx, timeouts, connections that are refused or cut, short answers. Never: 401, 403, 404, 412.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, TypeVar

from quanterr.checkpoints.base import StoredFile
from quanterr.errors import CheckpointError, ResourceError
from quanterr.util.text import display

Answer = TypeVar("Answer")

BLOCK = 8 << 20  # bytes of a range
MOST_KEPT = 64  # blocks: samples of a weight are read again when it is done
FETCHERS = 8  # ranges in flight
ATTEMPTS = 6
WAIT = 0.2  # seconds before the second attempt; four times as many before each other, at most
LONGEST_WAIT = 10.0


class Again(Exception):
    """An answer after which it is worth asking again; ``after`` seconds, where the server says so."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        """With the reason, for when it is given up."""
        super().__init__(reason)
        self.after = after


class NotThereError(CheckpointError):
    """There is no such file in the store."""


class Version(NamedTuple):
    """What identifies the content of a file."""

    size: int
    tag: str | None  # an ETag, a version; None where the store has none


class Store(Protocol):
    """Where files are; paths are relative to it."""

    def names(self, folder: str) -> list[str] | None:
        """Names in a folder; None where the store cannot list."""

    def version(self, path: str) -> Version:
        """Of a file, now."""

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """The bytes ``begin:end`` of that version of a file."""

    def shown(self, path: str) -> str:
        """Its address without credentials."""


class RemotePath:
    """A file or folder in a store; behaves like a path as far as opening checkpoints needs it."""

    def __init__(self, store: Store, inner: str) -> None:
        """``inner`` is relative to the store; of its top empty."""
        self.store, self._path = store, PurePosixPath(inner)

    @property
    def inner(self) -> str:
        """Relative to the store; of its top empty."""
        return "" if str(self._path) == "." else str(self._path)

    @property
    def name(self) -> str:
        """The last part."""
        return self._path.name

    @property
    def suffix(self) -> str:
        """Of the name."""
        return self._path.suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self.store, str(self._path.parent))

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, str(self._path / name))

    def __str__(self) -> str:
        return self.store.shown(self.inner)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def names(self) -> list[str] | None:
        """Names in this folder; None where the store cannot list."""
        return retried(str(self), lambda: self.store.names(self.inner))

    def open(self) -> "RemoteFile":
        """The file.

        Raises:
            CheckpointError: it is not there, or may not be read.
            ResourceError: the store does not answer.
        """
        return RemoteFile(self)

    def read_whole(self, limit: int) -> bytes:
        """A small file.

        Raises:
            FileNotFoundError: it is not there.
            CheckpointError: it may not be read.
            ResourceError: the store does not answer.
            ValueError: it is larger than ``limit``.
        """
        try:
            version = retried(str(self), lambda: self.store.version(self.inner))
        except NotThereError as error:
            raise FileNotFoundError(str(error)) from error
        if version.size > limit:
            raise ValueError(f"{version.size} bytes; the limit is {limit}")
        return retried(str(self), lambda: self.store.fetch(self.inner, 0, version.size, version))


def retried(where: str, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` gives, asked again while that may help.

    Raises:
        ResourceError: it did not help.
    """
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except Again as error:
            if attempt == ATTEMPTS - 1:
                raise ResourceError(f"{display(where)}: {ATTEMPTS} attempts failed, the last: {error}") from error
            time.sleep(min(error.after or WAIT * 4**attempt, LONGEST_WAIT))
    raise AssertionError("unreachable")


class RemoteFile(StoredFile):
    """A file of a store, read by position."""

    def __init__(self, path: RemotePath) -> None:
        """Find out its version.

        Raises:
            CheckpointError: it is not there, or may not be read.
            ResourceError: the store does not answer.
        """
        self.remote = path
        self.path = Path(path.name)
        self._version: Version = retried(str(path), lambda: path.store.version(path.inner))
        self.size = self._version.size

    def __str__(self) -> str:
        return display(str(self.remote))

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises:
            CheckpointError: the file ends before, changes, or may not be read.
            ResourceError: the store does not answer.
        """
        if offset + len(view) > self.size:
            raise CheckpointError(f"{self}: ends at byte {self.size}, while it is being read: truncated")
        done = 0
        while done < len(view):
            number, within = divmod(offset + done, BLOCK)
            piece = _blocks().get(self, number)[within : within + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)

    def fetch(self, number: int) -> bytes:
        """A block."""
        begin = number * BLOCK
        end = min(begin + BLOCK, self.size)
        store, inner = self.remote.store, self.remote.inner
        return retried(str(self.remote), lambda: store.fetch(inner, begin, end, self._version))

    def will_need(self, offset: int, n: int) -> None:
        """Fetch these bytes soon."""
        for number in range(offset // BLOCK, -(-(offset + n) // BLOCK)):
            _blocks().ask(self, number)

    def check_unchanged(self) -> None:
        """Raise CheckpointError when the store has another version now."""
        now = retried(str(self.remote), lambda: self.remote.store.version(self.remote.inner))
        if now != self._version:
            raise changed(str(self), self._version, now)

    @property
    def descriptor(self) -> int:
        """-1: there is no file here."""
        return -1

    @property
    def written(self) -> int:
        """Nothing in nanoseconds: its tag counts."""
        return 0

    @property
    def tag(self) -> str | None:
        """What tells this version from others; None where the store has nothing that does."""
        return self._version.tag

    def close(self) -> None:
        """Forget its blocks."""
        _blocks().forget(self)


def changed(where: str, before: Version, now: Version | None = None) -> CheckpointError:
    """The error of a file that is replaced while it is read."""
    sizes = f" (size {before.size} → {now.size})" if now is not None and now.size != before.size else ""
    return CheckpointError(
        f"{where}: changed while being read{sizes}; results discarded. Compare again when nothing writes to it"
    )


class _Blocks:
    """The blocks of all files that are in memory or on their way: a few, the oldest go first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="quanterr-fetch")
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, int], Future[bytes]] = OrderedDict()

    def ask(self, file: RemoteFile, number: int) -> "Future[bytes]":
        """The block, soon."""
        key = id(file), number
        with self._lock:
            found = self._known.pop(key, None)
            if found is None or (found.done() and found.exception() is not None):
                found = self._pool.submit(file.fetch, number)
            self._known[key] = found
            if len(self._known) > MOST_KEPT:
                for oldest in (key for key, one in self._known.items() if one.done()):
                    del self._known[oldest]
                    break
        return found

    def get(self, file: RemoteFile, number: int) -> memoryview:
        """The block, now."""
        return memoryview(self.ask(file, number).result())

    def forget(self, file: RemoteFile) -> None:
        """Drop the blocks of a file."""
        with self._lock:
            for key in [key for key in self._known if key[0] == id(file)]:
                self._known.pop(key).cancel()


@cache
def _blocks() -> _Blocks:
    return _Blocks()
