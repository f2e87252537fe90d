"""Documents as JSON Lines, for streaming, DuckDB and pandas: first the document, then what it lists, a line each.

Every line has ``record``: the kind of the document in the first, then what ``ITEMS`` call the lines of each list. The
first says in ``records`` how many of each follow, so that a file that was cut is noticed.
"""

from typing import IO

from quanterr.report.base import dumps
from quanterr.report.document import Document


def write(document: Document, file: IO[str]) -> None:
    """Write it line by line."""
    items, own = document.ITEMS, type(document).model_fields.items()
    head = {info.alias or name: getattr(document, name) for name, info in own if name not in items}
    records = {record: len(getattr(document, name)) for name, record in items.items()}
    kind = type(document).__name__.lower()
    file.write(dumps({"record": kind, **head, "records": records}) + "\n")
    for name, record in items.items():
        for item in getattr(document, name):
            # The item's own fields follow the name of its kind.
            file.write(f'{{"record": "{record}", {dumps(item)[1:]}\n')
