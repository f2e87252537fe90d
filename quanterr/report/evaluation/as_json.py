"""The evaluation as JSON: see model.py."""

from typing import IO

from quanterr.report.evaluation.model import Evaluation


def write(evaluation: Evaluation, file: IO[str]) -> None:
    """Write it."""
    file.write(evaluation.to_json())
