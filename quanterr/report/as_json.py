"""Results as strict JSON; the layers of a large report a line each."""

from typing import IO, Protocol


class Stored(Protocol):
    """What is written as JSON."""

    def write_json(self, file: IO[str]) -> None:
        """Write it as strict, ASCII JSON."""


def write(result: Stored, file: IO[str]) -> None:
    """Write it; a report piece by piece: a large one is never in memory twice."""
    result.write_json(file)
