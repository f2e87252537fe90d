"""The sensitivity of a model's weights, the cost that it predicts for candidates, and the file that stores it."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from math import fsum, hypot, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.documents.sensitivity import KLD, OUTPUT_ERROR, Cost
from quanterr.evaluation.denoisers.calls import Call
from quanterr.evaluation.files.backward import Curvature, Method, Part, Profile, parts_of_shape, profile
from quanterr.evaluation.files.fisher import Fisher
from quanterr.evaluation.files.gauss_newton import GaussNewton
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.names import Names
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.running.batches import batches_of_calls
from quanterr.evaluation.running.stream import Stream
from quanterr.evaluation.running.workload import CALLS, Inputs, inputs_of
from quanterr.outputs.files import open_replacement
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject

SCHEMA, SCHEMA_VERSION = "quanterr.sensitivity", "1.3"  # 1.1 adds alpha_se; 1.2 alphas, recipes; 1.3 cost
MEASURED = (
    "Where recipes were measured, readers correct it by measured / predicted. It covers errors of weights alone: the "
    "rounding of inputs, keys and values comes on top."
)
NOTES = {
    KLD: "KLD is about the sum of alpha * NMSE over the weights: mainly a ranking. As a prediction it holds up to "
    f"about 0.1 nat, and is too low beyond. {MEASURED}",
    OUTPUT_ERROR: "The output error of the calls, the mean of |y - x|^2 / |x|^2, is about the sum of alpha * NMSE over "
    f"the weights, for small errors that do not depend on each other. {MEASURED}",
}


@dataclass
class Profiled:
    """The sensitivity of each weight, by stored names, and the cost that it predicts for each candidate."""

    cost: Cost
    scored: int = 0
    weights: dict[str, JsonObject] = field(default_factory=dict)
    predictions: list[dict[str, float]] = field(default_factory=list)  # one per candidate: cost by row of the document
    alphas: list[dict[str, float]] = field(default_factory=list)  # one per candidate: predicted / NMSE by stored name

    def add(self, name: str, shape: Sequence[int], curvature: Curvature, scored: int) -> None:
        """Add the alpha of a matrix to that of its weight, as a stack has several and a tied head is used twice."""
        fields = self.weights.setdefault(name, {"alpha": 0.0, "alpha_se": 0.0, "shape": list(shape)})
        before = fields["alpha"], fields["alpha_se"]
        fields["alpha"] = _drop_nonfinite(before[0] + curvature.alpha(scored)) if before[0] is not None else None
        if (
            curvature.is_used
        ):  # an expert without tokens certainly costs nothing on this text, so it has no standard error
            fields["alpha_se"] = (
                _drop_nonfinite(hypot(before[1], curvature.alpha_se(scored))) if before[1] is not None else None
            )


class StoredParts:
    """The stored tensors that the matrices of a model's parameters are made of."""

    def __init__(self, names: Names, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the names of a model, and the shapes of the stored tensors by name."""
        self._names, self._shapes = names, shapes
        self._found: dict[str, dict[Part, str]] = {}

    def of(self, name: str, shape: tuple[int, ...]) -> dict[Part, str]:
        """Return the parts of a parameter with the names under which they are stored.

        If the model joins several tensors (the experts of Qwen3-MoE are stored separately, and so are gate and up), the
        outputs that come from one tensor are a part. To find them, the model's own conversion is applied to tensors
        that each hold their number. If it cuts tensors in other ways, parts have the name of the parameter.
        """
        if name not in self._found:
            stored = self._names.stored_name(name)
            joined = self._find_joined_parts(name) if len(self._names.sources(name)) > 1 else {}
            self._found[name] = joined or dict.fromkeys(parts_of_shape(name, shape), stored)
        return self._found[name]

    def shape_of(self, stored: str, part: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a stored tensor; for a name that only the model has, the shape of its part."""
        return self._shapes.get(stored, tuple(part))

    def _find_joined_parts(self, name: str) -> dict[Part, str]:
        sources = self._names.sources(name)
        numbers = {source: torch.tensor(n, dtype=torch.int32) for n, source in enumerate(sources)}
        where = self._names.tensors([name], lambda key: numbers[key].expand(self._shapes[key]))[name]
        names_by_part: dict[Part, str] = {}
        for expert in range(where.shape[0]) if where.dim() == 3 else (None,):
            matrix = where if expert is None else where[expert]
            if bool((matrix != matrix[:, :1]).any()):
                return {}
            runs, heights = torch.unique_consecutive(matrix[:, 0], return_counts=True)
            first = 0
            for number, height in zip(runs.tolist(), heights.tolist(), strict=True):
                names_by_part[Part(expert, first, first + height)] = sources[number]
                first += height
        return names_by_part


def profile_of(
    architecture: Architecture | Denoiser,
    originals: OriginalWeights,
    candidates: Sequence[Candidate],
    given: Tensor | Sequence[Call],
) -> Profiled:
    """Return the sensitivities and predictions of one forward and backward pass through the original.

    ``given`` are token ids (n, context), or recorded calls. The candidates' errors in a unit are computed while it is
    loaded.
    """
    model = architecture.build()
    names = architecture.names(model, originals, originals.weights)
    inputs: list[Inputs]
    method: Method
    if isinstance(given, Tensor):
        inputs, method, cost = [inputs_of(model, chunk[None]) for chunk in given], Fisher(given.shape[1] // 2), KLD
    else:
        inputs = [CALLS.inputs(model, architecture.config, batch) for batch in batches_of_calls(given)]
        method, cost = GaussNewton(), OUTPUT_ERROR
    others = [architecture.names(model, candidate.originals, candidate.names) for candidate in candidates]
    made = Profiled(cost, predictions=[{} for _ in candidates], alphas=[{} for _ in candidates])
    parts = StoredParts(names, {name: weight.shape for name, weight in originals.weights.items()})

    def visit_unit(unit: Unit, unit_profile: Profile) -> None:
        for slot in unit.slots:
            curvatures = unit_profile.by_part.pop(slot.name, None)  # pop frees them: they may be as large as the weight
            if curvatures is not None:
                weight = slot.tensor.detach()
                stored_parts = parts.of(slot.name, tuple(weight.shape))
                for part, curvature in curvatures.items():
                    made.add(
                        stored_parts[part],
                        parts.shape_of(stored_parts[part], curvature.shape),
                        curvature,
                        unit_profile.scored,
                    )
                for n, (other, candidate) in enumerate(zip(others, candidates, strict=True)):
                    error = other.tensors([slot.name], candidate.unfold)[slot.name].to(weight.dtype) - weight
                    predict(
                        n, names.stored_name(slot.name), stored_parts, curvatures, error, weight, unit_profile.scored
                    )

    def predict(
        n: int,
        row: str,
        stored: Mapping[Part, str],
        curvatures: Mapping[Part, Curvature],
        error: Tensor,
        weight: Tensor,
        scored: int,
    ) -> None:
        """Predict what the error of a parameter costs a candidate, and keep the alpha of each stored tensor.

        The NMSE is that of a whole stored tensor, for which errors and energies of a stack's experts are added up
        first.
        """
        costs: dict[str, list[tuple[float, float, float]]] = {}
        for part, curvature in curvatures.items():
            part_error = part.of(error)
            cost, squares = curvature.predict_cost(part_error, scored), float(part_error.double().square().sum())
            costs.setdefault(stored[part], []).append((cost, squares, curvature.energy))
            made.predictions[n][row] = made.predictions[n].get(row, 0.0) + cost
        for name, sums in costs.items():
            cost, squares, energy = (fsum(column) for column in zip(*sums, strict=True))
            if isfinite(cost) and squares > 0:
                made.alphas[n][name] = made.alphas[n].get(name, 0.0) + cost / squares * energy

    recorded, batches = not isinstance(given, Tensor), dict(enumerate(inputs))
    with closing(
        Stream(model, names, originals.get, batches, architecture.device, graph=True, recorded=recorded)
    ) as stream:
        made.scored = profile(stream, method, visit_unit, parts.of).scored
    return made


def _drop_nonfinite(figure: float) -> float | None:
    return figure if isfinite(figure) else None


class Measured(NamedTuple):
    """A recipe that was evaluated: its number among the candidates, its cost, and the standard error of the cost."""

    number: int
    cost: float
    error: float


class Basis(NamedTuple):
    """The inputs that a sensitivity was measured on."""

    original: str
    source: str  # path of the text or of the calls
    sha256: str
    context: int  # tokens of a chunk; 0 for calls


def write_sensitivity(
    path: str, profiled: Profiled, recipes: Mapping[str, Measured], basis: Basis, stored: Mapping[str, str]
) -> None:
    """Write the sensitivity as JSON, the most sensitive weight first, with the measurements of ``recipes`` by name.

    ``stored`` maps names of weights to those under which the original's file has them, where these differ.

    Raises:
        ResourceError: the file cannot be written.
    """
    ordered = sorted(profiled.weights.items(), key=lambda item: -(item[1]["alpha"] or 0.0))
    alphas: dict[str, dict[str, float]] = {name: {} for name in profiled.weights}
    for recipe, measured_recipe in recipes.items():
        for name, alpha in profiled.alphas[measured_recipe.number].items():
            alphas[name][recipe] = alpha
    cost = profiled.cost
    measured = {
        name: {
            cost.metric: fsum(filter(isfinite, profiled.predictions[recipe.number].values())),
            cost.field: recipe.cost,
            f"{cost.field}_se": recipe.error,
        }
        for name, recipe in recipes.items()
    }
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "original": basis.original,
        "cost": cost.name,
        "note": NOTES[cost],
        "tokens": {
            "source": basis.source,
            "sha256": basis.sha256,
            "context": basis.context,
            "scored": profiled.scored,
        },
        "recipes": measured,
        "weights": [
            {"layer_name": stored.get(name, name), **fields, "alphas": alphas[name]} for name, fields in ordered
        ],
    }
    with open_replacement(path, "--sensitivity-out") as file:
        file.write((strict_json.dumps(document, indent=1) + "\n").encode())
