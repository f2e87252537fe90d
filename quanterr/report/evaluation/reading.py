"""Reading a stored evaluation: strictly, and without torch."""

from pydantic import ValidationError

from quanterr.errors import ReportError
from quanterr.report.evaluation import SCHEMA
from quanterr.report.evaluation.model import SCHEMA_VERSION, Evaluation
from quanterr.util import strict_json
from quanterr.util.text import display


def read_evaluation(path: str) -> Evaluation:
    """The evaluation.

    Raises:
        ReportError: no such file, no evaluation, a schema version that this quanterr does not know, a wrong value.
    """
    where = display(path)
    try:
        with open(path, "rb") as file:
            raw = file.read()
        fields = strict_json.loads(raw)
        found = Evaluation.model_validate_json(raw, strict=True)
    except OSError as error:
        raise ReportError(f"{where}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ReportError(f"{where}: {display(place)}: {first['msg']}") from error
    except ValueError as error:
        raise ReportError(f"{where}: {display(str(error), 200)}") from error
    if fields.get("schema") != SCHEMA or found.schema_version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise ReportError(f"{where}: not an evaluation of schema version {SCHEMA_VERSION}")
    return found
