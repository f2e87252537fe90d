"""Fingerprints of stored tensors: checksums of a few bytes, which detect changed values, order and signs."""

from collections.abc import Iterable
from zlib import crc32

from quanterr.checkpoints import Entry

SAMPLE_BYTES = 64  # bytes that are sampled at each place


def sample_places(entry: Entry) -> tuple[int, tuple[int, int, int]]:
    """Return how many bytes of an entry are sampled at its start, middle and end, and where these begin."""
    n = min(SAMPLE_BYTES, entry.nbytes)
    return n, (0, (entry.nbytes - n) // 2, entry.nbytes - n)


def compute_fingerprint(entries: Iterable[Entry], sampled: bytes = b"") -> str:
    """Return the CRC-32 of the sampled bytes of all entries; ``sampled`` holds them if they are known."""
    if not sampled:
        samples = ((entry, *sample_places(entry)) for entry in entries)
        sampled = b"".join(entry.file.read(entry.offset + place, n) for entry, n, places in samples for place in places)
    return f"{crc32(sampled):08x}"
