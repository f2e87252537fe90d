"""The ranking as JSON: see model.py."""

from typing import IO

from quanterr.report.ranking.model import Ranking


def write(ranking: Ranking, file: IO[str]) -> None:
    """Write it."""
    file.write(ranking.to_json())
