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

AHEAD = 2 << 30  # most bytes to read: what fast disks deliver while torch is imported
PIECE = 8 << 20  # bytes requested at a time


class _Piece(NamedTuple):
    """A stretch of a file, and the share of its checkpoint that lies before it."""

    share: float
    file: CheckpointFile
    offset: int
    n: int


@contextmanager
def read_ahead(checkpoints: Iterable[Checkpoint]) -> Iterator[None]:
    """Have a thread prefetch the beginnings of all local files, in the order in which a comparison reads them.

    The thread ends with the context at the latest. Files in stores are left out: only bytes that are certainly needed
    are fetched from a store.
    """
    files = [[file for file in checkpoint.files if file.descriptor >= 0] for checkpoint in checkpoints]
    with run_beside(partial(_ask, list_pieces(files))):
        yield


def _ask(pieces: Iterable[_Piece], ended: threading.Event) -> None:
    left = AHEAD
    for piece in pieces:
        if ended.is_set() or left < piece.n:
            return
        piece.file.will_need(piece.offset, piece.n)
        left -= piece.n


def list_pieces(checkpoints: Iterable[Iterable[CheckpointFile]]) -> Iterator[_Piece]:
    """Yield stretches of the files of all checkpoints, front to back, advancing equally far in each checkpoint."""
    return heapq.merge(*map(_cut, checkpoints), key=itemgetter(0))


def _cut(files: Iterable[CheckpointFile]) -> Iterator[_Piece]:
    ordered = sorted(files, key=lambda file: str(file.path))
    total, done = sum(file.size for file in ordered), 0
    for file in ordered:
        for offset in range(0, file.size, PIECE):
            n = min(PIECE, file.size - offset)
            yield _Piece(done / total, file, offset, n)
            done += n
