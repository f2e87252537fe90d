"""The report as JSON Lines, for streaming, DuckDB and pandas: first the report, then what it lists, a line each.

Every line has ``record``: ``report`` for the first, then ``layer``, ``other_change``, ``lossless`` and
``not_compared``. The first says in ``records`` how many of each follow, so that a file that was cut is noticed.
"""

from typing import IO

from quanterr.report.model import Report, dumps

RECORDS = {"layers": "layer", "other_changes": "other_change", "lossless": "lossless", "not_compared": "not_compared"}


def write(report: Report, file: IO[str]) -> None:
    """Write it line by line."""
    head = {
        info.alias or name: getattr(report, name) for name, info in Report.model_fields.items() if name not in RECORDS
    }
    records = {record: len(getattr(report, key)) for key, record in RECORDS.items()}
    file.write(dumps({"record": "report", **head, "records": records}) + "\n")
    for key, record in RECORDS.items():
        for item in getattr(report, key):
            # The item's own fields follow the name of its kind.
            file.write(f'{{"record": "{record}", {dumps(item)[1:]}\n')
