"""A journal of finished weights, for a run that may be killed: what it holds is not computed again.

    1st line     the run that it belongs to, as JSON: inputs, selection, settings, versions
    each other   CRC-32 of the rest, in hexadecimal; candidate; number; a record as JSON

Records are handed to the system as weights finish, and reach the disk every few seconds. What is behind a torn or
damaged record does not count. A journal of another run is refused, never mixed in.
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
from quanterr.comparison.records import packed, unpacked
from quanterr.errors import ResourceError, UsageError
from quanterr.metrics import METRICS_VERSION
from quanterr.options import ComparisonOptions
from quanterr.pairing.plan import ComparedWeight, Plan
from quanterr.selection import Selection
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display
from quanterr.version import __version__

SCHEMA = "quanterr.journal 1"
CHANGED = "files that have changed"
WORDS = {"inputs": "other files or versions", "contents": CHANGED, "written": CHANGED, "plan": "other pairs or formats"}
SYNC = 2.0  # seconds between two times that records are sent to the disk


class Kept(NamedTuple):
    """A weight that was finished before."""

    candidate: int
    done: ComparedWeight


def identity(
    checkpoints: Sequence[Checkpoint], plans: Sequence[Plan], options: ComparisonOptions, is_native: bool
) -> JsonObject:
    """What two runs must have in common, so that a weight of one is a weight of the other.

    ``contents`` are a few blocks of each file. ``written`` is when the files were, and which they are on their disk:
    copies on two machines may differ in it alone.
    """
    return {
        "quanterr": __version__,
        "metrics": METRICS_VERSION,
        "kernel": "native" if is_native else "torch",
        "inputs": [checkpoint.identity for checkpoint in checkpoints],
        "contents": [file.digest() for checkpoint in checkpoints for file in checkpoint.files],
        "written": [file.written for checkpoint in checkpoints for file in checkpoint.files],
        "layers": list(Selection(options.layers, options.exclude).patterns),
        "outlier_threshold": options.outlier_threshold,
        "importance": _digest_of(options.importance),
        "plan": [_digest("\n".join(_described(plan))) for plan in plans],
    }


def _described(plan: Plan) -> Iterator[str]:
    """What is compared with what, and read as what."""
    for pair in plan.pairs:
        yield f"{pair.name} {pair.original.format} {pair.quantized.format} {pair.quantized.evidence}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digest_of(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


class Journal:
    """A file of finished weights, open for more. Each of several processes has its own: FILE, FILE.1, FILE.2 …"""

    def __init__(self, path: str | os.PathLike[str], run: JsonObject, rank: int = 0) -> None:
        """Take over what is there, whoever wrote it, or begin a new one.

        Raises:
            UsageError: it is of another run, or no journal.
            ResourceError: it cannot be written.
        """
        own = _named(path, rank)
        self._where = _shown(own)
        self._lock, self._synced = threading.Lock(), time.monotonic()
        run = json.loads(json.dumps(run))
        try:
            self.of_others = [kept for other in _all(path) if other != own for kept in _kept_in(other, run)]
            self._file = open(own, "r+b" if os.path.exists(own) else "w+b")  # noqa: SIM115 - open for the whole run
        except OSError as error:
            raise ResourceError(f"{self._where}: {error.strerror}") from error
        try:
            self.kept = list(self._taken_over(run))
        except OSError as error:
            self._file.close()
            raise ResourceError(f"{self._where}: {error.strerror}") from error
        except BaseException:
            self._file.close()
            raise

    def _taken_over(self, run: JsonObject) -> Iterator[Kept]:
        """The records that are whole; the file ends behind them then."""
        head = self._file.readline()
        if not head:
            self._file.write(json.dumps({"schema": SCHEMA, "run": run}).encode() + b"\n")
            self._sync()
            return
        _check(head, run, self._where)
        end = self._file.tell()
        for kept in _records(self._file):
            end = self._file.tell()
            yield kept
        self._file.seek(end)
        self._file.truncate()

    def add(self, candidate: int, done: ComparedWeight) -> None:
        """Append a finished weight.

        Raises:
            ResourceError: the disk is full.
        """
        text = f"{candidate} {done.number} {packed(done)}".encode()
        try:
            with self._lock:
                self._file.write(b"%08x " % zlib.crc32(text) + text + b"\n")
                self._file.flush()  # what the system has outlives this process, if not the machine
                if time.monotonic() - self._synced >= SYNC:
                    self._sync()
        except OSError as error:
            raise ResourceError(f"{self._where}: {error.strerror}") from error

    def _sync(self) -> None:
        self._file.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # a pipe or a device cannot
                raise
        self._synced = time.monotonic()

    def close(self) -> None:
        """All that was added is on the disk."""
        with self._lock:
            self._sync()
            self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(path: str | os.PathLike[str], rank: int) -> str:
    return f"{os.fspath(path)}.{rank}" if rank else os.fspath(path)


def _shown(path: str) -> str:
    return f"--resume {display(path)}"


def _all(path: str | os.PathLike[str]) -> list[str]:
    """The journals of a run that are there, of any number of processes."""
    own = Path(path)
    of_rank = re.compile(re.escape(own.name) + r"\.([1-9][0-9]*)")
    matches = map(of_rank.fullmatch, sorted(os.listdir(own.parent)))
    found = [_named(path, int(match[1])) for match in matches if match]
    return [os.fspath(path), *found] if own.exists() else found


def _kept_in(path: str, run: JsonObject) -> Iterator[Kept]:
    """The whole records of another process's journal, which may be new.

    Raises:
        UsageError: it is of another run, or no journal.
        ResourceError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            if head := file.readline():
                _check(head, run, _shown(path))
                yield from _records(file)
    except OSError as error:
        raise ResourceError(f"{_shown(path)}: {error.strerror}") from error


def _records(file: IO[bytes]) -> Iterator[Kept]:
    """Up to the first that is torn or damaged."""
    for line in iter(file.readline, b""):
        kept = _record(line)
        if kept is None:
            return
        yield kept


def _check(head: bytes, run: JsonObject, where: str) -> None:
    """Raise UsageError where a journal is none, or of another run."""
    try:
        fields = json.loads(head)
        known = fields["run"] if fields.get("schema") == SCHEMA else None
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError):
        known = None
    if not isinstance(known, dict):
        raise UsageError(f"{where}: not a journal of this version of quanterr; give another file")
    for key, own in run.items():
        if known.get(key) != own:
            what = WORDS.get(key, key)
            raise UsageError(f"{where}: of another run ({what}); delete it, or give another file")


def _record(line: bytes) -> Kept | None:
    """A line as a finished weight; None of one that is torn or damaged."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    candidate, number, record = text.split(b" ", 2)
    try:
        return Kept(int(candidate), unpacked(int(number), record.decode()))
    except ValueError:
        return None
