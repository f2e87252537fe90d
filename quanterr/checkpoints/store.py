"""What a store is, and paths in it: files that are not on this machine."""

from enum import StrEnum
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from quanterr.errors import CheckpointError
from quanterr.util.text import display
from quanterr.util.waiting import retried


class NotThereError(CheckpointError):
    """There is no such file in the store."""


class Kind(StrEnum):
    """What the tag of a version is, and so who can compare it."""

    STRONG = "strong ETag"  # the server: If-Match
    WEAK = "weak ETag"  # only who reads: If-Match never holds for it
    DATE = "Last-Modified"  # the server: If-Unmodified-Since
    OTHER = "other"  # who knows: of another kind of store, or there is none


class Version(NamedTuple):
    """What identifies the content of a file."""

    size: int
    tag: str | None  # an ETag, a date, a version; None where the store has none
    kind: Kind = Kind.OTHER


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

    def version(self) -> Version:
        """Of the file, now.

        Raises:
            CheckpointError: it is not there, or may not be read.
            ResourceError: the store does not answer.
        """
        return retried(str(self), lambda: self.store.version(self.inner))

    def fetch(self, begin: int, end: int, version: Version) -> bytes:
        """The bytes ``begin:end`` of that version.

        Raises:
            CheckpointError: it is another version now, or may not be read.
            ResourceError: the store does not answer.
        """
        return retried(str(self), lambda: self.store.fetch(self.inner, begin, end, version))

    def read_whole(self, limit: int) -> bytes:
        """A small file.

        Raises:
            FileNotFoundError: it is not there.
            CheckpointError: it may not be read.
            ResourceError: the store does not answer.
            ValueError: it is larger than ``limit``.
        """
        try:
            version = self.version()
        except NotThereError as error:
            raise FileNotFoundError(str(error)) from error
        if version.size > limit:
            raise ValueError(f"{version.size} bytes; the limit is {limit}")
        return self.fetch(0, version.size, version)


def changed(where: str, before: Version, now: Version | None = None) -> CheckpointError:
    """The error of a file that is replaced while it is read."""
    differs = ""
    if now is not None and now.size != before.size:
        differs = f" (size {before.size} → {now.size})"
    elif now is not None:
        differs = f" ({display(str(before.tag))} → {display(str(now.tag))})"
    return CheckpointError(
        f"{where}: changed while being read{differs}; results discarded. Compare again when nothing writes to it"
    )
