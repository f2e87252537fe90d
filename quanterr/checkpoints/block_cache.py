"""A cache on disk for ranges of a store's files (``--cache``), which later runs read.

Each range is a file with the bytes and, as a crash may damage files, their digest. Its key is made from the address and
the version of the remote file, so a file that was replaced is fetched again.
"""

import os
from hashlib import blake2b
from pathlib import Path

from quanterr.checkpoints.store import Store, Version
from quanterr.errors import ResourceError
from quanterr.util.atomic_file import replace_atomically
from quanterr.util.text import display

DIGEST_BYTES = 16


class CachedStore:
    """A store that looks for ranges in a cache folder first."""

    def __init__(self, store: Store, folder: str | os.PathLike[str]) -> None:
        """Wrap a store; the folder is created when the first range is kept."""
        self._store, self._folder = store, Path(folder)

    def list_names(self, folder: str) -> list[str] | None:
        """Return the names in a folder of the store."""
        return self._store.list_names(folder)

    def version(self, path: str) -> Version:
        """Ask the store for the file's current version, without which cached bytes are never used."""
        return self._store.version(path)

    def sha256(self, path: str) -> str | None:
        """Return the checksum that the store states."""
        return self._store.sha256(path)

    def show_address(self, path: str) -> str:
        """Return the address as the store shows it."""
        return self._store.show_address(path)

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """Return a range from the cache or the store; ranges of files without a version tag are not cached.

        Raises:
            ResourceError: the cache folder cannot be written.
        """
        if version.tag is None:
            return self._store.fetch(path, begin, end, version)
        key = blake2b(
            repr((self._store.show_address(path), version.size, version.tag)).encode(), digest_size=DIGEST_BYTES
        ).hexdigest()
        place = self._folder / key / f"{begin}-{end}"
        content = _read_cached(place)
        if content is None:
            content = self._store.fetch(path, begin, end, version)
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                with replace_atomically(place) as file:  # other processes may read the cache meanwhile
                    file.write(content)
                    file.write(_digest(content))
            except OSError as error:
                raise ResourceError(
                    f"{display(str(self._folder))}: {error.strerror}; the cache cannot be written: free space, "
                    "choose another --cache, or omit it"
                ) from error
        return content


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _read_cached(place: Path) -> bytes | None:
    """Return the cached bytes; None if there are none or they are damaged."""
    try:
        stored = place.read_bytes()
    except OSError:
        return None
    content, digest = stored[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
    return content if _digest(content) == digest else None
