"""Results as strict JSON; a large report has a line per layer."""

from typing import IO, Protocol


class JsonWritable(Protocol):
    """A result that can be written as JSON."""

    def write_json(self, file: IO[str]) -> None:
        """Write the result as strict ASCII JSON."""


def write(result: JsonWritable, file: IO[str]) -> None:
    """Write the result; reports are written piece by piece, so that a large one is never in memory twice."""
    result.write_json(file)
