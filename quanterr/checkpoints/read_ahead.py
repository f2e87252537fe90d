"""Reading ahead: files move into the system's cache while the program does something else."""

import heapq
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from quanterr.checkpoints.base import Checkpoint, CheckpointFile
from quanterr.util.background import run_beside

MAX_READ_AHEAD = 2 << 30  # maximum number of bytes to read: fast disks deliver as much while torch is imported
SECTION_BYTES = 8 << 20  # bytes requested at a time


class _Section(NamedTuple):
    """A section of a file, and the share of its checkpoint that precedes it."""

    share: float
    file: CheckpointFile
    offset: int
    n: int


@contextmanager
def read_ahead(checkpoints: Iterable[Checkpoint]) -> Iterator[None]:
    """Have a thread prefetch the beginnings of all local files, in the order in which a comparison reads them.

    The thread ends when the context ends, or before. Files in stores are left out, as only bytes that are certainly
    needed are fetched from a store.
    """
    files = [[file for file in checkpoint.files if file.descriptor >= 0] for checkpoint in checkpoints]
    with run_beside(partial(_ask, list_sections(files))):
        yield


def _ask(sections: Iterable[_Section], ended: threading.Event) -> None:
    left = MAX_READ_AHEAD
    for section in sections:
        if ended.is_set() or left < section.n:
            return
        section.file.will_need(section.offset, section.n)
        left -= section.n


def list_sections(checkpoints: Iterable[Iterable[CheckpointFile]]) -> Iterator[_Section]:
    """Yield sections of the files of all checkpoints, front to back, advancing equally far in each checkpoint."""
    return heapq.merge(*map(_cut, checkpoints), key=itemgetter(0))


def _cut(files: Iterable[CheckpointFile]) -> Iterator[_Section]:
    ordered = sorted(files, key=lambda file: str(file.path))
    total, done = sum(file.size for file in ordered), 0
    for file in ordered:
        for offset in range(0, file.size, SECTION_BYTES):
            n = min(SECTION_BYTES, file.size - offset)
            yield _Section(done / total, file, offset, n)
            done += n
