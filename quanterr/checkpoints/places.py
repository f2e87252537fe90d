"""Access to folders and files, local or in a store, for opening checkpoints."""

import os
from pathlib import Path

from quanterr.checkpoints.base import CheckpointFile
from quanterr.checkpoints.remote import RemoteFile
from quanterr.checkpoints.store import RemotePath
from quanterr.util.small_file import read_small

Place = Path | RemotePath


def is_folder(place: Place) -> bool:
    """Return whether a place is a folder, and not a file."""
    if isinstance(place, RemotePath):
        return not place.suffix and bool(place.list_names())
    return os.path.isdir(place)


def list_names(folder: Place) -> list[str]:
    """Return the names in a folder, sorted; none if the store cannot list."""
    return (folder.list_names() or []) if isinstance(folder, RemotePath) else sorted(os.listdir(folder))


def find_missing(folder: Place, names: list[str]) -> list[str]:
    """Return the names that a folder lacks; none if the store cannot list, as opening a missing file fails anyway."""
    if isinstance(folder, RemotePath):
        there = folder.list_names()
        return [] if there is None else [name for name in names if name not in there]
    return [name for name in names if not os.path.lexists(folder / name)]


def is_missing(place: Place) -> bool:
    """Return whether a local file is missing; False for a file in a store, where reading it fails if it is missing."""
    return isinstance(place, Path) and not os.path.lexists(place)


def open_file(place: Place) -> CheckpointFile:
    """Open a local or remote file.

    Raises:
        CheckpointError: the file is missing or unreadable.
        ResourceError: too many files are open, or the store does not answer.
    """
    return RemoteFile(place) if isinstance(place, RemotePath) else CheckpointFile(place)


def read_small_file(place: Place, limit: int) -> bytes:
    """Read a whole small file.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: the path is not a regular file, or the file has more than ``limit`` bytes.
        CheckpointError: the store denies access.
        ResourceError: the store does not answer.
    """
    return place.read_whole(limit) if isinstance(place, RemotePath) else read_small(place, limit)
