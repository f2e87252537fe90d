"""Subjects of a plan for rules: the plan itself with its size, cost and layers."""

from quanterr.documents.plan.model import Plan
from quanterr.documents.subjects import Item, Subject, Vocabulary
from quanterr.metrics.scores import collect_scores

OF_PLANS = ("bytes", "bits_per_weight", "cost", "bound", "snr_db", "least_bytes", "unplanned_bytes", "measured_kld")
OF_LAYERS = ("elements", "bytes", "bits_per_weight", "snr_db", "cost")

VOCABULARY = Vocabulary(
    "plan",
    dict.fromkeys(OF_LAYERS, "layer"),
    OF_PLANS,
    "bits_per_weight <= 4.5",
    done="the plan is complete",
    scores=collect_scores(Plan),
)


def list_subjects(plan: Plan) -> list[Subject]:
    """Return the plan as the only subject."""
    layers = [Item(layer.layer_name, "layer", layer) for layer in plan.layers]
    return [
        Subject(VOCABULARY, layers, {name: getattr(plan, name) for name in OF_PLANS}, patterns=plan.selection.patterns)
    ]
