"""What each stored tensor of a quantized checkpoint is of its original, by all of its codes: ``--every-code``."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from quanterr.documents.base import Model
from quanterr.metrics.scores import Count, doc

OriginClass = Literal["identical", "exact", "nearest", "compensated", "not_shown"]
NOT_SHOWN: OriginClass = "not_shown"
# What the class of a tensor proves about it, in decreasing order of certainty.
CLASSES: Mapping[OriginClass, str] = {
    "identical": "the original's bits, or those of a cast",
    "exact": "the values that `recipe`, which is deterministic, gives for the original: nothing is free",
    "nearest": "each code is the nearest level to the original's value in the arithmetic that is named: only scales "
    "(`scale_bits`), and codes near a bound between two levels (`free_codes`), could carry anything",
    "compensated": "codes as the declared method (GPTQ, AutoRound, AWQ, an importance matrix) leaves them, in number "
    "and distance, and no warning about the layer: a likelihood, no proof, as a small change before it stays hidden",
    "not_shown": "anything else, with the places",
}


class TensorOrigin(Model, kw_only=True, rename={"kind": "class"}):
    """What one stored tensor is of its original. Rows and columns are those of the weight as a matrix, from 0."""

    layer_name: Annotated[str, doc("name in the original; of a tensor that only one side has, its own")]
    display_name: Annotated[str, doc("layer_name with unprintable characters escaped")]
    kind: Annotated[OriginClass, doc("`identical`, `exact`, `nearest`, `compensated` or `not_shown`")]
    format: Annotated[str | None, doc("see `quanterr formats`; null if it was not compared")]
    elements: Count
    bytes: Annotated[Count, doc("stored bytes of all its parts")]
    recipe: Annotated[str | None, doc("the recipe that gives all of its values, or all but ``unlike`` of them")] = None
    unlike: Annotated[Count, doc("values that the recipe does not give")] = 0
    unlike_places: Annotated[tuple[tuple[int, int], ...], doc("row and column of the first of them in each row")] = ()
    arithmetic: Annotated[str | None, doc("of `nearest`: the arithmetic in which every code is the nearest")] = None
    free_codes: Annotated[Count | None, doc("of `nearest`: codes so near a bound that two levels would do")] = None
    scale_bits: Annotated[Count | None, doc("stored bits besides the codes, which the codes do not determine")] = None
    off_codes: Annotated[Count, doc("codes that are not the nearest level, or numbers that are not the original's")] = 0
    off_rows: Annotated[Count, doc("rows that hold them")] = 0
    steps: Annotated[tuple[int, ...], doc("how many of them are 1, 2, and 3 or more levels away")] = ()
    places: Annotated[tuple[tuple[int, int], ...], doc("row and column of the first of them in each of the rows")] = ()
    reason: Annotated[str | None, doc("why it is in no better class")] = None


class ClassSize(Model):
    """The tensors of one class."""

    tensors: Count
    elements: Count
    bytes: Count


def sum_classes(tensors: Iterable[TensorOrigin]) -> dict[OriginClass, ClassSize]:
    """Return the size of each class that has tensors, in the order of CLASSES."""
    sizes = {origin_class: ClassSize(0, 0, 0) for origin_class in CLASSES}
    for tensor in tensors:
        size = sizes[tensor.kind]
        size.tensors += 1
        size.elements += tensor.elements
        size.bytes += tensor.bytes
    return {origin_class: size for origin_class, size in sizes.items() if size.tensors}


def compute_share(tensors: Iterable[TensorOrigin], origin_class: OriginClass) -> float | None:
    """Return the share of the bytes that a class has, 0 to 1; 1 if its tensors are empty, None if there are none."""
    sizes = sum_classes(tensors)
    total = sum(size.bytes for size in sizes.values())
    if origin_class not in sizes:
        return 0.0 if sizes else None
    return sizes[origin_class].bytes / total if sizes[origin_class].bytes else 1.0
