"""Files that are not on this machine, read by ranges; the stores that they are in: stores.py.

Headers and weights are read by ranges, in blocks that are fetched a few at a time and ahead of those who need them. A
few blocks are kept in memory, and on disk where block_cache.py is asked to. What the store says of a file's version
(its ETag, a commit of the hub) goes with every range, so that a file that changes while it is read is an error.
Ranges that a server answers with other bytes than were asked for are errors too, or are asked for again.

Retried: 429, 5xx, timeouts, connections that are refused or cut, short answers. Never: 401, 403, 404, 412.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from quanterr.checkpoints.base import StoredFile
from quanterr.checkpoints.store import Kind, RemotePath, Version, changed
from quanterr.errors import CheckpointError
from quanterr.util.text import display

BLOCK = 8 << 20  # bytes of a range
MOST_KEPT = 64  # blocks: samples of a weight are read again when it is done
FETCHERS = 8  # ranges in flight


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
        self._version: Version = path.version()
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
        return self.remote.fetch(begin, min(begin + BLOCK, self.size), self._version)

    def will_need(self, offset: int, n: int) -> None:
        """Fetch these bytes soon."""
        for number in range(offset // BLOCK, -(-(offset + n) // BLOCK)):
            _blocks().ask(self, number)

    def check_unchanged(self) -> None:
        """Raise CheckpointError when the store has another version now, unless each range was stated to be of ours."""
        if self._version.kind is not Kind.OTHER:
            return
        now = self.remote.version()
        if now != self._version:
            raise changed(str(self), self._version, now)

    @property
    def descriptor(self) -> int:
        """-1: there is no file here."""
        return -1

    @property
    def written(self) -> tuple[int, ...]:
        """Nothing: its tag counts."""
        return ()

    def digest(self) -> None:
        """Nothing: its tag counts."""

    @property
    def tag(self) -> str | None:
        """What tells this version from others; None where the store has nothing that does."""
        return self._version.tag

    def close(self) -> None:
        """Forget its blocks."""
        _blocks().forget(self)


class _Blocks:
    """The blocks of all files that are in memory or on their way: a few, the oldest go first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="quanterr-fetch")
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[RemoteFile, int], Future[bytes]] = OrderedDict()

    def ask(self, file: RemoteFile, number: int) -> "Future[bytes]":
        """The block, soon."""
        key = file, number
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
            for key in [key for key in self._known if key[0] is file]:
                self._known.pop(key).cancel()


@cache
def _blocks() -> _Blocks:
    return _Blocks()
