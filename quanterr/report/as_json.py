"""Documents as strict JSON; the layers of a large report a line each."""

from typing import IO

from quanterr.report.document import Document


def write(document: Document, file: IO[str]) -> None:
    """Write it; a report piece by piece: a large one is never in memory twice."""
    document.write_json(file)
