"""Folders and files, on this machine or in a store: what opening a checkpoint asks of either."""

import os
from pathlib import Path

from quanterr.checkpoints.base import StoredFile
from quanterr.checkpoints.remote import RemoteFile
from quanterr.checkpoints.store import RemotePath
from quanterr.util.small_file import read_small

Place = Path | RemotePath


def is_folder(place: Place) -> bool:
    """Whether it is a folder, and not a file."""
    if isinstance(place, RemotePath):
        return not place.suffix and bool(place.names())
    return os.path.isdir(place)


def names_in(folder: Place) -> list[str]:
    """Names in a folder, in order; of a store that cannot list none."""
    return (folder.names() or []) if isinstance(folder, RemotePath) else sorted(os.listdir(folder))


def missing_in(folder: Place, names: list[str]) -> list[str]:
    """Those of the names that are not in a folder; a store that cannot list is not asked, and opening tells."""
    if isinstance(folder, RemotePath):
        there = folder.names()
        return [] if there is None else [name for name in names if name not in there]
    return [name for name in names if not os.path.lexists(folder / name)]


def opened(place: Place) -> StoredFile:
    """The file.

    Raises:
        CheckpointError: it is missing, or cannot be read.
        ResourceError: too many open files, a store that does not answer.
    """
    return RemoteFile(place) if isinstance(place, RemotePath) else StoredFile(place)


def read_whole(place: Place, limit: int) -> bytes:
    """The bytes of a small file.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is not a regular file, or has more than ``limit`` bytes.
    """
    return place.read_whole(limit) if isinstance(place, RemotePath) else read_small(place, limit)
