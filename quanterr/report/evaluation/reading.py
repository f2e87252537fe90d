"""Strict reader of stored evaluations, without torch."""

from quanterr.report.evaluation import SCHEMA
from quanterr.report.evaluation.model import SCHEMA_VERSION, Evaluation
from quanterr.report.stored import read_stored


def read_evaluation(path: str) -> Evaluation:
    """Read an evaluation.

    Raises:
        ReportError: the file is missing, no evaluation, of an unknown schema version, or has an invalid value.
    """
    return read_stored(path, Evaluation, SCHEMA, SCHEMA_VERSION)
