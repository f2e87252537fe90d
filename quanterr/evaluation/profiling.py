"""The sensitivity of a model's weights, the divergence that it predicts for candidates, and the file that keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, hypot, isfinite
from typing import NamedTuple

from torch import Tensor

from quanterr.evaluation.models import Architecture, Denoiser
from quanterr.evaluation.names import ConversionNames
from quanterr.evaluation.sensitivity import Curvature, Profile, profile
from quanterr.evaluation.sides import Candidate, Sides
from quanterr.evaluation.stepping import Stream
from quanterr.evaluation.tokens import fingerprint
from quanterr.evaluation.units import Unit
from quanterr.evaluation.workload import inputs_of
from quanterr.report.files import open_replacement
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject

SCHEMA, SCHEMA_VERSION = "quanterr.sensitivity", "1.2"  # 1.1 adds alpha_se; 1.2 alphas, recipes
NOTE = (
    "KLD is about the sum of alpha * NMSE over the weights: a ranking first. As a prediction it holds up to about "
    "0.1 nat, and is too low beyond. Where recipes were measured, readers correct it by measured / predicted. "
    "It is of errors of weights: the rounding of inputs, keys and values comes on top."
)


@dataclass
class Profiled:
    """What is known of each weight, by stored names, and what it predicts of each candidate."""

    scored: int = 0
    weights: dict[str, JsonObject] = field(default_factory=dict)
    predictions: list[dict[str, float]] = field(default_factory=list)  # of each candidate
    alphas: list[dict[str, float]] = field(default_factory=list)  # the same / NMSE: of errors as each candidate has

    def add(self, name: str, curvature: Curvature, scored: int) -> None:
        """Take in what is known of a weight; of one that is used twice (a tied head) the sum of both."""
        found = self.weights.setdefault(name, {"alpha": 0.0, "alpha_se": 0.0, "shape": list(curvature.shape)})
        before = found["alpha"], found["alpha_se"]
        found["alpha"] = _known(before[0] + curvature.alpha(scored)) if before[0] is not None else None
        found["alpha_se"] = _known(hypot(before[1], curvature.alpha_se(scored))) if before[1] is not None else None


def profile_of(
    architecture: Architecture | Denoiser, sides: Sides, candidates: Sequence[Candidate], given: Tensor
) -> Profiled:
    """One pass through the original and back, with the errors of the candidates where each unit is loaded."""
    model = architecture.build()
    names = ConversionNames(model, sides.weights)
    inputs = [inputs_of(model, chunk[None]) for chunk in given]
    others = [ConversionNames(model, candidate.names) for candidate in candidates]
    made = Profiled(predictions=[{} for _ in candidates], alphas=[{} for _ in candidates])

    def seen(unit: Unit, found: Profile) -> None:
        slots = {slot.name: slot.tensor.detach() for slot in unit.slots if slot.name in found.found}
        for name, weight in slots.items():
            curvature = found.found[name]
            stored = names.stored_name(name)
            made.add(stored, curvature, found.scored)
            for n, (other, candidate) in enumerate(zip(others, candidates, strict=True)):
                error = other.tensors([name], candidate.compared)[name].to(weight.dtype) - weight
                predicted = curvature.predicted(error, found.scored)
                own, alphas = made.predictions[n], made.alphas[n]
                own[stored] = own.get(stored, 0.0) + predicted
                energy = float(error.double().square().sum())
                if isfinite(predicted) and energy > 0:
                    alphas[stored] = alphas.get(stored, 0.0) + predicted / energy * curvature.energy

    stream = Stream(model, names, sides.get, inputs, architecture.device, graph=True)
    try:
        made.scored = profile(stream, len(inputs), given.shape[1] // 2, seen).scored
    finally:
        stream.close()
    return made


def _known(figure: float) -> float | None:
    return figure if isfinite(figure) else None


class Measured(NamedTuple):
    """A recipe that was evaluated: its number among the candidates, its divergence and its standard error [nat]."""

    number: int
    kld: float
    error: float


def write_sensitivity(
    path: str, profiled: Profiled, recipes: Mapping[str, Measured], original: str, source: str, given: Tensor
) -> None:
    """Write it as JSON, the most sensitive weight first; with what was measured of ``recipes``, by name.

    Raises:
        ResourceError: the file cannot be written.
    """
    ordered = sorted(profiled.weights.items(), key=lambda item: -(item[1]["alpha"] or 0.0))
    alphas: dict[str, dict[str, float]] = {name: {} for name in profiled.weights}
    for recipe, one in recipes.items():
        for name, alpha in profiled.alphas[one.number].items():
            alphas[name][recipe] = alpha
    measured = {
        name: {
            "predicted_kld": fsum(filter(isfinite, profiled.predictions[recipe.number].values())),
            "kld": recipe.kld,
            "kld_se": recipe.error,
        }
        for name, recipe in recipes.items()
    }
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "original": original,
        "note": NOTE,
        "tokens": {
            "source": source,
            "sha256": fingerprint(given),
            "context": given.shape[1],
            "scored": profiled.scored,
        },
        "recipes": measured,
        "weights": [{"layer_name": name, **fields, "alphas": alphas[name]} for name, fields in ordered],
    }
    with open_replacement(path, "--sensitivity") as file:
        file.write((strict_json.dumps(document, indent=1) + "\n").encode())
