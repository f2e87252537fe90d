"""Results as strict JSON; a large report has a line per layer."""

from typing import IO

from quanterr.report.document import Result


def write(result: Result, file: IO[str]) -> None:
    """Write the result; reports are written piece by piece, so that a large one is never in memory twice."""
    result.write_json(file)
