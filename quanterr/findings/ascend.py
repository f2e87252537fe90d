"""Contradictions between ModelSlim's quant_model_description.json and the stored tensors.

Runtimes read each weight as the type that this file states for it.

vllm-ascend fails if the file does not name a weight; SGLang takes the codes of such a weight, and of one declared as
FLOAT, for weights. A part that the type needs and the checkpoint lacks stays uninitialized.

Reference: see formats/shared/ascend_types.py.
"""

from collections.abc import Iterator, Sequence

from quanterr.checkpoints import ASCEND_CONFIG
from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.formats import Weight
from quanterr.formats.shared.ascend_types import TYPES
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import count, display, itemize

REMEDY = f"put the {ASCEND_CONFIG} that the quantizer wrote back next to the weights, or quantize again"


def check_description(description: JsonFields, weights: Sequence[Weight]) -> Iterator[Finding]:
    """Report weights whose storage contradicts the description, with one finding for each contradiction."""
    names_by_problem: dict[str, list[str]] = {}
    for weight in weights:
        if problem := _compare(description.get(weight.codes.name), weight):
            names_by_problem.setdefault(problem, []).append(weight.codes.name)
    for problem, names in names_by_problem.items():
        message = f"{ASCEND_CONFIG} {problem}: {count(len(names), 'weight')}: {itemize(names, 3)}"
        yield make_finding("config_mismatch", "error", None, message, REMEDY, layers=names, key=ASCEND_CONFIG)


def _compare(declared: object, weight: Weight) -> str:
    """Return how a weight contradicts its declared type; empty if it does not."""
    if declared is None:
        return "does not name codes, which vllm-ascend refuses and SGLang takes for weights" if weight.has_codes else ""
    known = TYPES.get(declared) if isinstance(declared, str) else None
    if known is None:  # FLOAT, or a type of sparse numbers, which are plain
        return f"declares {display(str(declared))}, but they are stored as {weight.format}" if weight.has_codes else ""
    if weight.format not in known.formats:
        return f"declares {declared}, but they are stored as {weight.format}"
    if known.needs not in weight.parts:
        return f"declares {declared}, but their {known.needs} is missing, which runtimes then leave uninitialized"
    return ""
