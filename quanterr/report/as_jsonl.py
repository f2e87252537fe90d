"""Documents as JSON Lines, for streaming, DuckDB and pandas: first the document, then its items, a line each.

Every line has ``record``: the kind of the document in the first, then the kind of each item. The first says in
``records`` how many of each follow, so that a file that was cut is noticed.
"""

from typing import IO

from quanterr.report.document import Document


def write(document: Document, file: IO[str]) -> None:
    """Write it line by line."""
    file.writelines(document.json_lines())
