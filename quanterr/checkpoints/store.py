"""The interface of a store of remote files, and paths in a store."""

from enum import StrEnum
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from quanterr.errors import CheckpointError
from quanterr.util.text import display
from quanterr.util.waiting import retry


class NotThereError(CheckpointError):
    """The error for a file that does not exist in the store."""


class TagKind(StrEnum):
    """The type of a version's tag, which determines whether the server, or only the client, can compare it."""

    STRONG = "strong ETag"  # the server can compare it, with If-Match
    WEAK = "weak ETag"  # only the client can compare it, as If-Match never matches a weak ETag
    DATE = "Last-Modified"  # the server can compare it, with If-Unmodified-Since
    OTHER = "other"  # a tag of another kind of store, or no tag


class Version(NamedTuple):
    """The version of a remote file, which identifies its content."""

    size: int
    tag: str | None  # an ETag, a date or a version; None if the store has none
    tag_kind: TagKind = TagKind.OTHER


class Store(Protocol):
    """A place that holds remote files; paths are relative to it."""

    def list_names(self, folder: str) -> list[str] | None:
        """Return the names in a folder; None if the store cannot list."""

    def version(self, path: str) -> Version:
        """Return the current version of a file."""

    def fetch(self, path: str, begin: int, end: int, version: Version) -> bytes:
        """Return the bytes ``begin:end`` of this version of a file."""

    def sha256(self, path: str) -> str | None:
        """Return the SHA-256 that the store states for a file, in lower case; None if it states none."""

    def show_address(self, path: str) -> str:
        """Return the address of a path, without credentials."""


class RemotePath:
    """A file or folder in a store, with the parts of pathlib's interface that opening checkpoints needs."""

    def __init__(self, store: Store, inner: str) -> None:
        """Make a path; ``inner`` is relative to the store, and empty for its root."""
        self.store, self._path = store, PurePosixPath(inner)

    @property
    def inner(self) -> str:
        """The path relative to the store; empty for its root."""
        return "" if str(self._path) == "." else str(self._path)

    @property
    def name(self) -> str:
        """The last component."""
        return self._path.name

    @property
    def suffix(self) -> str:
        """The suffix of the name, with its dot."""
        return self._path.suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder that contains the path."""
        return RemotePath(self.store, str(self._path.parent))

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, str(self._path / name))

    def __str__(self) -> str:
        return self.store.show_address(self.inner)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def list_names(self) -> list[str] | None:
        """Return the names in this folder; None if the store cannot list."""
        return retry(str(self), lambda: self.store.list_names(self.inner))

    def version(self) -> Version:
        """Return the current version of the file.

        Raises:
            CheckpointError: the file does not exist, or access is denied.
            ResourceError: the store does not answer.
        """
        return retry(str(self), lambda: self.store.version(self.inner))

    def fetch(self, begin: int, end: int, version: Version) -> bytes:
        """Return the bytes ``begin:end`` of this version.

        Raises:
            CheckpointError: the file has another version now, or access is denied.
            ResourceError: the store does not answer.
        """
        return retry(str(self), lambda: self.store.fetch(self.inner, begin, end, version))

    def read_whole(self, limit: int) -> bytes:
        """Read a whole small file.

        Raises:
            FileNotFoundError: the file does not exist.
            CheckpointError: access is denied.
            ResourceError: the store does not answer.
            ValueError: the file is larger than ``limit`` bytes.
        """
        try:
            version = self.version()
        except NotThereError as error:
            raise FileNotFoundError(str(error)) from error
        if version.size > limit:
            raise ValueError(f"{version.size} bytes; the limit is {limit}")
        return self.fetch(0, version.size, version)


def make_changed_error(where: str, before: Version, now: Version | None = None) -> CheckpointError:
    """Return the error for a file that was replaced while it was read."""
    differs = ""
    if now is not None and now.size != before.size:
        differs = f" (size {before.size} → {now.size})"
    elif now is not None:
        differs = f" ({display(str(before.tag))} → {display(str(now.tag))})"
    return CheckpointError(
        f"{where}: changed while being read{differs}; results discarded. Compare again when nothing writes to it"
    )
