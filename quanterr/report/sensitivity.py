"""What ``evaluate --sensitivity`` wrote, and the divergence that it predicts from the errors of a report's layers."""

from collections.abc import Iterable
from math import fsum
from typing import NamedTuple

from quanterr.errors import ReportError
from quanterr.report.model import Layer
from quanterr.util import strict_json
from quanterr.util.text import display

SCHEMA, MAJOR = "quanterr.sensitivity", "1"


class Sensitivity(NamedTuple):
    """How much each weight matters: KLD ≈ Σ alpha · NMSE."""

    path: str
    alphas: dict[str, float]

    def predicted(self, layers: Iterable[Layer]) -> float | None:
        """The divergence of the layers that it knows; None if it knows none, or an error is undefined [nat]."""
        known = [(self.alphas[layer.layer_name], layer.nmse) for layer in layers if layer.layer_name in self.alphas]
        if not known or any(nmse is None for _, nmse in known):
            return None
        return fsum(alpha * nmse for alpha, nmse in known)


def read_sensitivity(path: str) -> Sensitivity:
    """The file.

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
    return Sensitivity(path, alphas)
