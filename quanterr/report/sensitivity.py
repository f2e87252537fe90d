"""Reader of files from ``evaluate --sensitivity``: sensitivities of weights, and the measured cost of recipes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log

from quanterr.errors import ReportError
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display, listed

SCHEMA, MAJOR = "quanterr.sensitivity", "1"
FARTHEST = 0.3  # nat; above this, divergence is no longer proportional to squared error
SURE = 3.0  # minimum ratio of a divergence to its standard error for calibration


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Sensitivities alpha of weights, for KLD ≈ Σ alpha · NMSE [nat]."""

    weights: Mapping[str, float]  # alpha by name, for evenly spread errors
    recipes: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # alpha by recipe and name, for the errors of the recipe
    factors: Mapping[str, float] = field(default_factory=dict)  # measured / predicted KLD by recipe

    def alphas(self, recipe: str | None = None) -> dict[str, float]:
        """Return alpha by weight for the errors of a recipe, or of an unknown source if None; calibrated if possible.

        A measured recipe is calibrated by its own measured / predicted KLD, any other by the geometric mean of all.
        """
        factor = self.factors.get(recipe or "", self.factor)
        found = {**self.weights, **self.recipes.get(recipe or "", {})}
        return {name: factor * alpha for name, alpha in found.items()}

    @property
    def factor(self) -> float:
        """The calibration of recipes that were not measured."""
        return exp(sum(map(log, self.factors.values())) / len(self.factors)) if self.factors else 1.0

    @property
    def note(self) -> str | None:
        """The calibration in words; None without one."""
        if not self.factors:
            return None
        each = listed([f"{name} {factor:.2f}" for name, factor in self.factors.items()], 4)
        return f"predicted KLD is calibrated by recipes measured with the sensitivity (measured ÷ predicted: {each})"


def read_sensitivity(path: str) -> Sensitivity:
    """Read the sensitivities of weights from a file.

    Raises:
        ReportError: the file is missing, or evaluate --sensitivity did not write it.
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
        raise ReportError(f"{where}: not a file of quanterr evaluate --sensitivity")
    weights: dict[str, float] = {}
    recipes: dict[str, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(name := row.get("layer_name"), str):
            continue
        if (alpha := _read_number(row, "alpha")) is not None:
            weights[name] = alpha
        own = row.get("alphas")
        own = own if isinstance(own, dict) else {}
        for recipe in own:
            if (alpha := _read_number(own, recipe)) is not None:
                recipes.setdefault(recipe, {})[name] = alpha
    return Sensitivity(weights, recipes, _read_factors(fields.get("recipes")))


def _read_factors(measured: object) -> dict[str, float]:
    """Return measured / predicted KLD of recipes whose KLD exceeds the noise and is small enough to predict."""
    found = {}
    for name, row in measured.items() if isinstance(measured, dict) else ():
        if not isinstance(row, dict):
            continue
        kld, error, predicted = (_read_number(row, key) for key in ("kld", "kld_se", "predicted_kld"))
        if kld is None or error is None or not predicted or predicted < 0:
            continue
        if SURE * error < kld <= FARTHEST and isfinite(kld / predicted):
            found[name] = kld / predicted
    return found


def _read_number(row: JsonObject, key: str) -> float | None:
    found = row.get(key)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
