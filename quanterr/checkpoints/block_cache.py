"""Ranges of a store's files that are kept on disk for the next run (``--cache``).

Each has a file of its own: the bytes, then a digest of them, as a machine that stops may leave damaged files. They are
found by the address and the version of what they belong to, so a file that was replaced is fetched again.
"""

import os
from hashlib import blake2b
from pathlib import Path

from quanterr.checkpoints.store import Store, Version
from quanterr.errors import ResourceError
from quanterr.util.replacing import replacing
from quanterr.util.text import display

DIGEST = 16  # bytes


class Cached:
    """A store whose ranges are looked for in a folder first."""

    def __init__(self, store: Store, folder: str | os.PathLike[str]) -> None:
        """The folder is made when there is something to keep."""
        self._store, self._folder = store, Path(folder)

    def names(self, folder: str) -> list[str] | None:
        """Those of the store."""
        return self._store.names(folder)

    def version(self, path: str) -> Version:
        """That of the store, now: what is kept is never taken without asking."""
        return self._store.version(path)

    def shown(self, path: str) -> str:
        """As the store shows it."""
        return self._store.shown(path)

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """The bytes, which are kept; those of a file without a version are not.

        Raises:
            ResourceError: the folder cannot be written to.
        """
        if version.tag is None:
            return self._store.fetch(path, begin, end, version)
        key = blake2b(
            repr((self._store.shown(path), version.size, version.tag)).encode(), digest_size=DIGEST
        ).hexdigest()
        place = self._folder / key / f"{begin}-{end}"
        found = _kept(place)
        if found is None:
            found = self._store.fetch(path, begin, end, version)
            try:
                _keep(place, found)
            except OSError as error:
                raise ResourceError(
                    f"{display(str(self._folder))}: {error.strerror}; what is read cannot be kept there: make room, "
                    "choose another --cache, or leave it out"
                ) from error
        return found


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST).digest()


def _kept(place: Path) -> bytes | None:
    """What is kept there; None if nothing is, or if it is damaged."""
    try:
        stored = place.read_bytes()
    except OSError:
        return None
    content, digest = stored[:-DIGEST], stored[-DIGEST:]
    return content if _digest(content) == digest else None


def _keep(place: Path, content: bytes) -> None:
    """Whole or not at all: others may look for it meanwhile."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as file:
        file.write(content)
        file.write(_digest(content))
