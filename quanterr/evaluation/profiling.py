"""The sensitivity of a model's weights, the divergence that it predicts for candidates, and the file that keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from torch import Tensor

from quanterr.evaluation.models import Architecture, Denoiser
from quanterr.evaluation.names import Names
from quanterr.evaluation.sensitivity import Profile, profile
from quanterr.evaluation.sides import Candidate, Sides
from quanterr.evaluation.stepping import Stream
from quanterr.evaluation.tokens import fingerprint
from quanterr.evaluation.units import Unit
from quanterr.evaluation.workload import inputs_of
from quanterr.report.files import replaced
from quanterr.util import strict_json
from quanterr.util.strict_json import JsonObject

SCHEMA, SCHEMA_VERSION = "quanterr.sensitivity", "1.1"  # 1.1 adds alpha_se
NOTE = (
    "KLD is about the sum of alpha * NMSE over the weights: a ranking first. As a prediction it holds up to about "
    "0.1 nat, and is too low beyond."
)


@dataclass
class Profiled:
    """What is known of each weight, by stored names, and what it predicts of each candidate."""

    scored: int = 0
    weights: dict[str, JsonObject] = field(default_factory=dict)
    predictions: list[dict[str, float]] = field(default_factory=list)


def profile_of(
    architecture: Architecture | Denoiser, sides: Sides, candidates: Sequence[Candidate], given: Tensor
) -> Profiled:
    """One pass through the original and back, with the errors of the candidates where each unit is loaded."""
    model = architecture.build()
    names = Names(model, sides.weights)
    inputs = [inputs_of(model, chunk[None]) for chunk in given]
    others = [Names(model, candidate.names) for candidate in candidates]
    made = Profiled(predictions=[{} for _ in candidates])

    def seen(unit: Unit, found: Profile) -> None:
        slots = {slot.name: slot.there.detach() for slot in unit.slots if slot.name in found.found}
        for name, weight in slots.items():
            curvature = found.found[name]
            stored = names.stored_name(name)
            figures = {"alpha": curvature.alpha(found.scored), "alpha_se": curvature.alpha_se(found.scored)}
            made.weights[stored] = {
                **{key: figure if isfinite(figure) else None for key, figure in figures.items()},
                "shape": list(curvature.shape),
            }
            for own, other, candidate in zip(made.predictions, others, candidates, strict=True):
                error = other.tensors([name], candidate.compared)[name].to(weight.dtype) - weight
                own[stored] = curvature.predicted(error, found.scored)

    stream = Stream(model, names, sides.get, inputs, architecture.device, graph=True)
    try:
        made.scored = profile(stream, len(inputs), given.shape[1] // 2, seen).scored
    finally:
        stream.close()
    return made


def write_sensitivity(path: str, profiled: Profiled, original: str, source: str, given: Tensor) -> None:
    """Write it as JSON, the most sensitive weight first.

    Raises:
        ResourceError: the file cannot be written.
    """
    ordered = sorted(profiled.weights.items(), key=lambda item: -(item[1]["alpha"] or 0.0))
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
        "weights": [{"layer_name": name, **fields} for name, fields in ordered],
    }
    with replaced(path, "--sensitivity") as file:
        file.write((strict_json.dumps(document, indent=1) + "\n").encode())
