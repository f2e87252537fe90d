"""Reading a stored evaluation: strictly, and without torch."""

from quanterr.report.evaluation import SCHEMA
from quanterr.report.evaluation.model import SCHEMA_VERSION, Evaluation
from quanterr.report.stored import read_stored


def read_evaluation(path: str) -> Evaluation:
    """The evaluation.

    Raises:
        ReportError: no such file, no evaluation, a schema version that this quanterr does not know, a wrong value.
    """
    return read_stored(path, Evaluation, SCHEMA, SCHEMA_VERSION)
