"""Remote files, read by ranges from a store (see stores.py).

Headers and weights are read in blocks that are fetched in parallel and ahead of use. A few blocks are kept in memory,
and on disk with ``--cache`` (block_cache.py). Every request carries the file's version (its ETag, or a commit of the
hub), so a file that changes while it is read is an error. If a server sends bytes other than the requested ones, the
request is repeated or fails.

Retried: 408, 425, 429, 500, 502, 503, 504, timeouts, refused or broken connections, short answers. Never retried: all
other statuses, such as 401, 403, 404 and 412.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from quanterr.checkpoints.base import CheckpointFile
from quanterr.checkpoints.store import RemotePath, TagKind, Version, make_changed_error
from quanterr.errors import CheckpointError
from quanterr.util.text import display

BLOCK_BYTES = 8 << 20  # bytes of a block
MAX_KEPT_BLOCKS = 64  # blocks kept in memory, as samples of a weight are read again at its end
MAX_FETCHES = 8  # blocks fetched at the same time


class RemoteFile(CheckpointFile):
    """A file in a store, read by position."""

    def __init__(self, path: RemotePath) -> None:
        """Ask the store for the file's version.

        Raises:
            CheckpointError: the file does not exist, or access is denied.
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
            CheckpointError: the file ends too early, has changed, or access is denied.
            ResourceError: the store does not answer.
        """
        if offset + len(view) > self.size:
            raise CheckpointError(f"{self}: ends at byte {self.size}, while it is being read: truncated")
        done = 0
        while done < len(view):
            number, within = divmod(offset + done, BLOCK_BYTES)
            part = _blocks().get(self, number)[within : within + len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)

    def fetch(self, number: int) -> bytes:
        """Fetch block ``number`` from the store."""
        begin = number * BLOCK_BYTES
        return self.remote.fetch(begin, min(begin + BLOCK_BYTES, self.size), self._version)

    def will_need(self, offset: int, n: int) -> None:
        """Start to fetch these bytes in the background."""
        for number in range(offset // BLOCK_BYTES, -(-(offset + n) // BLOCK_BYTES)):
            _blocks().ask(self, number)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the store now has another version, unless each range already states its version."""
        if self._version.tag_kind is not TagKind.OTHER:
            return
        now = self.remote.version()
        if now != self._version:
            raise make_changed_error(str(self), self._version, now)

    @property
    def timestamps(self) -> tuple[int, ...]:
        """An empty tuple, as the tag identifies the version."""
        return ()

    def digest(self) -> None:
        """Return None, as the tag identifies the version."""

    @property
    def tag(self) -> str | None:
        """The tag that identifies this version; None if the store has none."""
        return self._version.tag

    def close(self) -> None:
        """Drop the file's blocks."""
        _blocks().forget(self)


class _Blocks:
    """The blocks of all files that are in memory or being fetched; the oldest are dropped first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="quanterr-fetch")
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[RemoteFile, int], Future[bytes]] = OrderedDict()

    def ask(self, file: RemoteFile, number: int) -> "Future[bytes]":
        """Return a future for the block, fetching it in the background if necessary."""
        key = file, number
        with self._lock:
            future = self._known.pop(key, None)
            if future is None or (future.done() and future.exception() is not None):
                future = self._pool.submit(file.fetch, number)
            self._known[key] = future
            if len(self._known) > MAX_KEPT_BLOCKS:
                for oldest in (key for key, block in self._known.items() if block.done()):
                    del self._known[oldest]
                    break
        return future

    def get(self, file: RemoteFile, number: int) -> memoryview:
        """Return the block, waiting until it is fetched."""
        return memoryview(self.ask(file, number).result())

    def forget(self, file: RemoteFile) -> None:
        """Drop and cancel all blocks of a file."""
        with self._lock:
            for key in [key for key in self._known if key[0] is file]:
                self._known.pop(key).cancel()


@cache
def _blocks() -> _Blocks:
    return _Blocks()
