"""Documents as JSON Lines, for streaming, DuckDB and pandas: first the document, then its items, one per line.

Every line has ``record``: the type of the document in the first line, the type of the item in all others. ``records``
in the first line has the number of items of each type, so that readers notice a truncated file.
"""

from typing import IO

from quanterr.documents.document import Document


def write(document: Document, file: IO[str]) -> None:
    """Write the document line by line."""
    file.writelines(document.json_lines())
