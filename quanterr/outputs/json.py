"""Results as strict JSON, with a line per layer or other item."""

from typing import IO

from quanterr.documents.document import Result


def write(result: Result, file: IO[str]) -> None:
    """Write the result."""
    result.write_json(file)
