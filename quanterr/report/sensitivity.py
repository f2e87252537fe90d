"""What ``evaluate --sensitivity`` wrote."""

from quanterr.errors import ReportError
from quanterr.util import strict_json
from quanterr.util.text import display

SCHEMA, MAJOR = "quanterr.sensitivity", "1"


def read_sensitivity(path: str) -> dict[str, float]:
    """How much each weight matters: alpha by name, KLD ≈ Σ alpha · NMSE [nat].

    Raises:
        ReportError: no such file, or not such a file.
    """
    where = display(path)
    try:
        with open(path, "rb") as file:
            fields = strict_json.loads(file.read())
    except OSError as error:
        raise ReportError(f"{where}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{where}: {display(str(error), 200)}") from error
    rows = fields.get("weights") if isinstance(fields, dict) else None
    version = str(fields.get("schema_version", "")) if isinstance(fields, dict) else ""
    if not isinstance(rows, list) or fields.get("schema") != SCHEMA or version.partition(".")[0] != MAJOR:
        raise ReportError(f"{where}: not what quanterr evaluate --sensitivity writes")
    alphas = {}
    for row in rows:
        alpha = row.get("alpha") if isinstance(row, dict) else None
        if isinstance(alpha, int | float) and not isinstance(alpha, bool) and isinstance(row.get("layer_name"), str):
            alphas[row["layer_name"]] = float(alpha)
    return alphas
