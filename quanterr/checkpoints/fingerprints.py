"""Fingerprints of stored tensors: checksums of a few bytes, which detect changed values, order and signs."""

from collections.abc import Iterable
from zlib import crc32

from quanterr.checkpoints import Entry

SAMPLED = 64  # bytes that are sampled at each place


def sample_places(entry: Entry) -> tuple[int, tuple[int, int, int]]:
    """Return how many bytes of an entry are sampled at its start, middle and end, and where these begin."""
    n = min(SAMPLED, entry.nbytes)
    return n, (0, (entry.nbytes - n) // 2, entry.nbytes - n)


def compute_fingerprint(entries: Iterable[Entry], sampled: bytes = b"") -> str:
    """Return the CRC-32 of the sampled bytes of all entries; ``sampled`` holds them if they are known."""
    return f"{crc32(sampled or b''.join(map(_read_sample, entries))):08x}"


def _read_sample(entry: Entry) -> bytes:
    n, places = sample_places(entry)
    return b"".join(entry.file.read(entry.offset + place, n) for place in places)
