"""The numbers of an inspection that rules may name, and that diffs compare: sizes of the checkpoint and its weights."""

from dataclasses import dataclass

from quanterr.documents.diff.base import Changes
from quanterr.documents.diff.candidates.model import ItemChange
from quanterr.documents.gate_results import Reason, list_waived
from quanterr.documents.inspection.model import SCORES, Inspection
from quanterr.documents.subjects import Item, Subject, Vocabulary

OF_CHECKPOINTS = ("bytes", "bits_per_weight", "tensors", "unread")
OF_WEIGHTS = ("elements", "bytes", "bits_per_weight", "code_bits", "scales")

VOCABULARY = Vocabulary(
    "inspection",
    dict.fromkeys(OF_WEIGHTS, "weight"),
    OF_CHECKPOINTS,
    "bits_per_weight <= 4.5",
    done="every weight is read",
    scores=SCORES,
    loads=True,
)


def list_subjects(inspection: Inspection) -> list[Subject]:
    """Return the checkpoint; weights that are not read, and other errors, make every verdict inconclusive."""
    weights = [Item(weight.name, "weight", weight, weight.reason) for weight in inspection.weights]
    whole = {name: getattr(inspection, name) for name in OF_CHECKPOINTS}
    troubles = [Reason(text, "result") for text in inspection.problems]
    waived = list_waived(inspection)
    return [Subject(VOCABULARY, weights, whole, unreliable=troubles, loading=inspection.loading, waived=waived)]


@dataclass(slots=True)
class StoredChange(ItemChange):
    """A weight whose format or size changed."""

    old_format: str | None
    new_format: str | None
    old_bytes: int
    new_bytes: int


def _compare_weights(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    old, new = was.values, now.values
    if (old.format, old.bytes) == (new.format, new.bytes):
        return None
    return float(new.bytes - old.bytes), StoredChange(now.name, old.format, new.format, old.bytes, new.bytes)


CHANGES = Changes("weight", _compare_weights, lambda old, new: None)
