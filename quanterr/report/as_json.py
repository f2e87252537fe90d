"""The report as strict JSON, a layer per line."""

from typing import IO

from quanterr.report.model import Report


def write(report: Report, file: IO[str]) -> None:
    """Write it piece by piece: a large report is never in memory twice."""
    report.write_json(file)
