"""A journal of finished weights, from which a killed run resumes without computing them again.

    first line    identity of the run, as JSON: inputs, selection, settings, versions
    other lines   CRC-32 of the rest of the line in hexadecimal; candidate; number; record as JSON

Records are written as weights finish, and synced to disk every few seconds. Everything after an incomplete or damaged
record is ignored. A journal of another run is refused.
"""

import errno
import hashlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from quanterr.checkpoints import Checkpoint
from quanterr.comparison.records import pack, unpack
from quanterr.errors import ResourceError, UsageError
from quanterr.metrics import METRICS_VERSION
from quanterr.options import ComparisonOptions
from quanterr.pairing.model import Pairing, WeightResult
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display
from quanterr.version import __version__

SCHEMA = "quanterr.journal 1"
CHANGED_FILES = "files that have changed"
WORDS = {
    "inputs": "other files or versions",
    "contents": CHANGED_FILES,
    "written": CHANGED_FILES,
    "plan": "other pairs or formats",
    "samples": "plan estimates nothing from samples, other commands do",
}
SYNC_INTERVAL = 2.0  # seconds between two syncs to disk


class FinishedWeight(NamedTuple):
    """A weight that an earlier run has finished."""

    candidate: int
    done: WeightResult


def make_identity(
    checkpoints: Sequence[Checkpoint],
    pairings: Sequence[Pairing],
    options: ComparisonOptions,
    is_native: bool,
    samples: bool,
) -> JsonObject:
    """Return the identity of a run: runs with equal identities compute equal weights.

    ``contents`` has digests of a few blocks of each file. ``written`` has inodes and times of the files, the only field
    that may differ between copies on two machines.
    """
    plans = (
        "\n".join(
            f"{pair.name} {pair.original.format} {pair.quantized.format} {pair.quantized.evidence}"
            for pair in pairing.pairs
        )
        for pairing in pairings
    )
    return {
        "quanterr": __version__,
        "metrics": METRICS_VERSION,
        "kernel": "native" if is_native else "torch",
        "samples": samples,
        "inputs": [checkpoint.identity for checkpoint in checkpoints],
        "contents": [file.digest() for checkpoint in checkpoints for file in checkpoint.files],
        "written": [file.timestamps for checkpoint in checkpoints for file in checkpoint.files],
        "layers": list(options.selection.patterns),
        "outlier_threshold": options.outlier_threshold,
        "importance": digest_file(options.importance),
        "plan": [hashlib.sha256(plan.encode("utf-8", "surrogatepass")).hexdigest() for plan in plans],
    }


def digest_file(path: str | os.PathLike[str] | None) -> str | None:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits; None for no file."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Journal:
    """An open journal of finished weights. Each process of a run has its own file: FILE, FILE.1, FILE.2 …"""

    def __init__(self, path: str | os.PathLike[str], run: JsonObject, rank: int = 0) -> None:
        """Read the existing journals of all ranks, and open or create this rank's own.

        Raises:
            UsageError: a file belongs to another run, or is not a journal.
            ResourceError: a file cannot be read or written.
        """
        own_path = _make_path(path, rank)
        self._where = _describe_option(own_path)
        self._lock, self._synced = threading.Lock(), time.monotonic()
        run = json.loads(json.dumps(run))
        try:
            self.of_others = [
                kept for other in _list_journals(path) if other != own_path for kept in _read_journal(other, run)
            ]
            self._file = open(own_path, "r+b" if os.path.exists(own_path) else "w+b")  # noqa: SIM115 - open for the whole run
        except OSError as error:
            raise ResourceError(f"{self._where}: {error.strerror}") from error
        try:
            self.kept = list(self._take_over(run))
        except OSError as error:
            self._file.close()
            raise ResourceError(f"{self._where}: {error.strerror}") from error
        except BaseException:
            self._file.close()
            raise

    def _take_over(self, run: JsonObject) -> Iterator[FinishedWeight]:
        """Yield the complete records, then truncate the file after the last one."""
        head = self._file.readline()
        if not head:
            self._file.write(json.dumps({"schema": SCHEMA, "run": run}).encode() + b"\n")
            self._sync()
            return
        _check(head, run, self._where)
        end = self._file.tell()
        for kept in _read_records(self._file):
            end = self._file.tell()
            yield kept
        self._file.seek(end)
        self._file.truncate()

    def add(self, candidate: int, done: WeightResult) -> None:
        """Append a finished weight.

        Raises:
            ResourceError: the file cannot be written.
        """
        text = f"{candidate} {done.number} {pack(done)}".encode()
        try:
            with self._lock:
                self._file.write(b"%08x " % zlib.crc32(text) + text + b"\n")
                self._file.flush()  # data in the system's cache survives a crash of this process
                if time.monotonic() - self._synced >= SYNC_INTERVAL:
                    self._sync()
        except OSError as error:
            raise ResourceError(f"{self._where}: {error.strerror}") from error

    def _sync(self) -> None:
        self._file.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # pipes and devices cannot be synced
                raise
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync all records to disk and close the file."""
        with self._lock:
            self._sync()
            self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_path(path: str | os.PathLike[str], rank: int) -> str:
    return f"{os.fspath(path)}.{rank}" if rank else os.fspath(path)


def _describe_option(path: str) -> str:
    return f"--resume {display(path)}"


def _list_journals(path: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the existing journals of a run, whose number of processes may differ from this run's."""
    first = Path(path)
    of_rank = re.compile(re.escape(first.name) + r"\.([1-9][0-9]*)")
    matches = map(of_rank.fullmatch, sorted(os.listdir(first.parent)))
    others = [_make_path(path, int(match[1])) for match in matches if match]
    return [os.fspath(path), *others] if first.exists() else others


def _read_journal(path: str, run: JsonObject) -> Iterator[FinishedWeight]:
    """Yield the complete records of another process's journal, which may still be empty.

    Raises:
        UsageError: the file belongs to another run, or is not a journal.
        ResourceError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            if head := file.readline():
                _check(head, run, _describe_option(path))
                yield from _read_records(file)
    except OSError as error:
        raise ResourceError(f"{_describe_option(path)}: {error.strerror}") from error


def _read_records(file: IO[bytes]) -> Iterator[FinishedWeight]:
    """Yield records up to the first incomplete or damaged one."""
    for line in iter(file.readline, b""):
        kept = _parse_record(line)
        if kept is None:
            return
        yield kept


def _check(head: bytes, run: JsonObject, where: str) -> None:
    """Raise UsageError if the first line is not a journal's header, or belongs to another run."""
    try:
        fields = json.loads(head)
        known = fields["run"] if fields.get("schema") == SCHEMA else None
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError):
        known = None
    if not isinstance(known, dict):
        raise UsageError(f"{where}: not a journal of this version of quanterr; give another file")
    for key, value in run.items():
        if known.get(key) != value:
            what = WORDS.get(key, key)
            raise UsageError(f"{where}: the journal of another run ({what}); delete it, or give another file")


def _parse_record(line: bytes) -> FinishedWeight | None:
    """Parse a line into a finished weight; return None if it is incomplete or damaged."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    candidate, number, record = text.split(b" ", 2)
    try:
        return FinishedWeight(int(candidate), unpack(int(number), record.decode()))
    except ValueError:
        return None
