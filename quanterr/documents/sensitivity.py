"""Reads files of ``evaluate --sensitivity-out``: sensitivities of weights, and the measured costs of recipes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log, sqrt
from statistics import stdev
from typing import NamedTuple

from quanterr.documents.reading import read_json
from quanterr.errors import ReportError
from quanterr.util.strict_json import JsonObject
from quanterr.util.student import find_t
from quanterr.util.text import display, itemize

SCHEMA, MAJOR = "quanterr.sensitivity", "1"
MIN_SIGNIFICANCE = 3.0  # minimum ratio of a cost to its standard error for calibration
MIN_RECIPES = 3  # minimum number of recipes that show how much measured / predicted varies
SHARE_OUTSIDE = 0.05  # expected share of measurements outside a prediction's interval


class Cost(NamedTuple):
    """A cost that errors of weights cause: its name, its field in files, and up to which value it is linear in NMSE."""

    name: str
    field: str
    farthest: float  # above this, the cost grows more slowly than the squared error

    @property
    def metric(self) -> str:
        """The report's metric that predicts this cost."""
        return f"predicted_{self.field}"

    @property
    def measure(self) -> str:
        """The measure of plans that predicts this cost."""
        return f"predicted {self.name}"


KLD = Cost("KLD", "kld", 0.3)  # divergence of predicted tokens [nat]
OUTPUT_ERROR = Cost("output error", "output_error", 0.1)  # relative error of recorded calls
COSTS = (KLD, OUTPUT_ERROR)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The sensitivity alpha of each weight: errors cost about Σ alpha · NMSE."""

    weights: Mapping[str, float]  # alpha by name, for errors with the same NMSE in each row
    recipes: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # alpha by recipe and name, for the errors of the recipe
    factors: Mapping[str, float] = field(default_factory=dict)  # measured / predicted cost by recipe
    cost: Cost = KLD

    def alphas(self, recipe: str | None = None) -> dict[str, float]:
        """Return alpha by weight for the errors of a recipe, or of an unknown source if None; calibrated if possible.

        A measured recipe is calibrated by its own measured / predicted cost, any other by the geometric mean of all.
        """
        factor = self.factors.get(recipe or "", self.factor)
        by_weight = {**self.weights, **self.recipes.get(recipe or "", {})}
        return {name: factor * alpha for name, alpha in by_weight.items()}

    @property
    def factor(self) -> float:
        """The calibration of recipes that were not measured."""
        return exp(sum(map(log, self.factors.values())) / len(self.factors)) if self.factors else 1.0

    @property
    def margin(self) -> float | None:
        """The factor m of the 95 % interval of a calibrated prediction p, from p / m to m · p; None if unknown.

        It comes from Student's prediction interval for one more logarithm of measured / predicted, and assumes that
        all these logarithms are independent and normal.
        """
        if len(self.factors) < MIN_RECIPES:
            return None
        n, logs = len(self.factors), [log(factor) for factor in self.factors.values()]
        return exp(find_t(SHARE_OUTSIDE, n - 1) * stdev(logs) * sqrt(1 + 1 / n))

    @property
    def note(self) -> str | None:
        """The calibration in words, with the interval of other recipes and plans; None without a calibration."""
        if not self.factors:
            return None
        each = itemize([f"{name} {factor:.2f}" for name, factor in self.factors.items()], 4)
        words = (
            f"{self.cost.measure} is calibrated by recipes measured with the sensitivity (measured ÷ predicted: {each})"
        )
        margin = self.margin
        if margin is None:
            return f"{words}; measure {MIN_RECIPES} or more to learn how far off others may be"
        return (
            f"{words}; if predictions for other recipes are as accurate, 19 of 20 measurements are {1 / margin:.2g} to "
            f"{margin:.2g} times the prediction"
        )


def read_sensitivity(path: str) -> Sensitivity:
    """Read the sensitivities of weights from a file.

    Raises:
        ReportError: the file is missing, evaluate --sensitivity-out did not write it, or an alpha is negative or
            infinite.
    """
    where = display(path)
    _, fields = read_json(path)
    rows, version = fields.get("weights"), str(fields.get("schema_version", ""))
    if not isinstance(rows, list) or fields.get("schema") != SCHEMA or version.partition(".")[0] != MAJOR:
        raise ReportError(f"{where}: not a file of quanterr evaluate --sensitivity-out")
    weights: dict[str, float] = {}
    recipes: dict[str, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(name := row.get("layer_name"), str):
            continue
        if (alpha := _read_alpha(row, "alpha", where, name)) is not None:
            weights[name] = alpha
        by_recipe = row.get("alphas")
        by_recipe = by_recipe if isinstance(by_recipe, dict) else {}
        for recipe in by_recipe:
            if (alpha := _read_alpha(by_recipe, recipe, where, name)) is not None:
                recipes.setdefault(recipe, {})[name] = alpha
    named = fields.get("cost", KLD.name)
    cost = next((known for known in COSTS if known.name == named), None)
    if cost is None:
        raise ReportError(f"{where}: predicts {display(str(named))}, which this version does not know: update quanterr")
    return Sensitivity(weights, recipes, _read_factors(fields.get("recipes"), cost), cost)


def _read_factors(measured: object, cost: Cost) -> dict[str, float]:
    """Return measured / predicted cost of recipes whose cost exceeds the noise and is small enough to predict."""
    factors = {}
    for name, row in measured.items() if isinstance(measured, dict) else ():
        if not isinstance(row, dict):
            continue
        keys = cost.field, f"{cost.field}_se", cost.metric
        known, error, predicted = (_read_number(row, key) for key in keys)
        if known is None or error is None or not predicted or predicted < 0:
            continue
        if MIN_SIGNIFICANCE * error < known <= cost.farthest and isfinite(known / predicted):
            factors[name] = known / predicted
    return factors


def _read_alpha(row: JsonObject, key: str, where: str, name: str) -> float | None:
    alpha = _read_number(row, key)
    if alpha is None or 0 <= alpha < inf:
        return alpha
    raise ReportError(
        f"{where}: {display(name)}: alpha is {alpha:g}, expected a finite number of at least 0; measure it again: "
        "quanterr evaluate --sensitivity-out"
    )


def _read_number(row: JsonObject, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
