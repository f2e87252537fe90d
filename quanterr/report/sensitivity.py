"""What ``evaluate --sensitivity`` wrote: how much each weight matters, and what recipes cost that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log

from quanterr.errors import ReportError
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, listed

SCHEMA, MAJOR = "quanterr.sensitivity", "1"
FARTHEST = 0.3  # nat: beyond, divergence no longer grows with the squared error, and says nothing of smaller errors
SURE = 3.0  # standard errors of a divergence that calibrates


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How much each weight matters: KLD ≈ Σ alpha · NMSE [nat]."""

    weights: Mapping[str, float]  # alpha by name, of an error that is spread evenly
    recipes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # alpha by name of the errors of a recipe
    factors: Mapping[str, float] = field(default_factory=dict)  # measured / predicted, by recipe

    def alphas(self, recipe: str | None = None) -> dict[str, float]:
        """By name of the weight, of the errors that a recipe makes, or something unknown; calibrated where it can be.

        The divergence of a recipe that was measured is that which was measured; of others, and of files, it is
        corrected by what these were off on (geometric) average.
        """
        factor = self.factors.get(recipe or "", self.factor)
        found = {**self.weights, **self.recipes.get(recipe or "", {})}
        return {name: factor * alpha for name, alpha in found.items()}

    @property
    def factor(self) -> float:
        """What predictions are multiplied by of recipes that were not measured."""
        return exp(sum(map(log, self.factors.values())) / len(self.factors)) if self.factors else 1.0

    @property
    def note(self) -> str | None:
        """By what predictions are calibrated, in words; None where they are not."""
        if not self.factors:
            return None
        each = listed([f"{name} {factor:.2f}" for name, factor in self.factors.items()], 4)
        return f"predicted KLD is calibrated by what was measured beside the sensitivity (measured ÷ predicted: {each})"


def read_sensitivity(path: str) -> Sensitivity:
    """How much each weight matters, as a file says it.

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
    weights: dict[str, float] = {}
    recipes: dict[str, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(name := row.get("layer_name"), str):
            continue
        if (alpha := _number(row, "alpha")) is not None:
            weights[name] = alpha
        own = row.get("alphas")
        own = own if isinstance(own, dict) else {}
        for recipe in own:
            if (alpha := _number(own, recipe)) is not None:
                recipes.setdefault(recipe, {})[name] = alpha
    return Sensitivity(weights, recipes, _factors(fields.get("recipes")))


def _factors(measured: object) -> dict[str, float]:
    """Measured / predicted, of recipes whose divergence is neither noise nor too large for a prediction."""
    found = {}
    for name, row in measured.items() if isinstance(measured, dict) else ():
        if not isinstance(row, dict):
            continue
        kld, error, predicted = (_number(row, key) for key in ("kld", "kld_se", "predicted_kld"))
        if kld is None or error is None or not predicted or predicted < 0:
            continue
        if SURE * error < kld <= FARTHEST and isfinite(kld / predicted):
            found[name] = kld / predicted
    return found


def _number(row: JsonObject, key: str) -> float | None:
    found = row.get(key)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
