"""Documents as JSON Lines, for streaming, DuckDB and pandas: the document first, then one line per item of its lists.

Every line has ``record``: the kind of document in the first line, then the name that ``ITEMS`` gives to items of each
list. The first line counts the lines of each name in ``records``, so that a truncated file can be detected.
"""

from typing import IO

from quanterr.report.base import dumps
from quanterr.report.document import Document


def write(document: Document, file: IO[str]) -> None:
    """Write the document line by line."""
    items, own = document.ITEMS, type(document).model_fields.items()
    head = {info.alias or name: getattr(document, name) for name, info in own if name not in items}
    records = {record: len(getattr(document, name)) for name, record in items.items()}
    kind = type(document).__name__.lower()
    file.write(dumps({"record": kind, **head, "records": records}) + "\n")
    for name, record in items.items():
        for item in getattr(document, name):
            file.write(f'{{"record": "{record}", {dumps(item)[1:]}\n')
