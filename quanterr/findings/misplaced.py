"""Parts of a fused or stacked weight in wrong places: experts, and the halves of gate and up.

A sample of each part is compared with the same sample of every part of the original. ``repairs`` cannot find these, as
it tries the first rows of a whole weight, which all belong to the first expert.
"""

from collections import Counter
from collections.abc import Sequence

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.limits import FACTOR_TOLERANCE, MIN_VALUES, SAME_VECTOR_COSINE
from quanterr.findings.repairs import describe_order
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.pairing.names import has_equal_parts
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import count, display, itemize

SAMPLE_ELEMENTS = 1 << 12  # maximum number of elements of each part to compare
REMEDY = "find out where the program that wrote it put each expert"


def find_misplaced(pair: Pair, reader: Reader) -> Finding | None:
    """Report the parts of a weight that hold other parts of the original, if all parts are parts of it."""
    rows = pair.original.matrix_rows
    if rows != pair.quantized.matrix_rows:
        return None
    experts = pair.original.matrix[0] // rows if rows else 1
    if experts > 1 and (places := _find_places(pair, rows, experts, reader)):
        return _report_experts(pair, places)
    half, odd = divmod(rows or pair.original.matrix[0], 2)
    if has_equal_parts(pair.name) and half and not odd and _find_places(pair, half, 2, reader) == [1, 0]:
        message = f"{display(pair.name)}: its halves are exchanged: gate is stored where up belongs, and up for gate"
        return make_finding("permuted", "error", pair.name, message, "exchange the halves of its rows", found="halves")
    return None


def _find_places(pair: Pair, rows: int, parts: int, reader: Reader) -> list[int]:
    """Return the part of the original that each part holds; empty if all are in place, or some resemble none."""
    x = _read_parts(pair.original, rows, parts, reader)
    y = _read_parts(pair.quantized, rows, parts, reader)
    if x.shape[1] < MIN_VALUES:
        return []
    cosines, places = (y @ x.T).max(1)
    in_place = (x * y).sum(1) > cosines - FACTOR_TOLERANCE
    sources: list[int] = torch.where(in_place, torch.arange(parts), places).tolist()
    return sources if bool((cosines > SAME_VECTOR_COSINE).all()) and sources != list(range(parts)) else []


def _read_parts(weight: Weight, rows: int, parts: int, reader: Reader) -> Tensor:
    """Return a sample of each part, (parts, elements), scaled to unit length."""
    cols = min(weight.matrix[1], SAMPLE_ELEMENTS)
    n = min(rows, SAMPLE_ELEMENTS // cols)
    read = [reader.read(weight, Chunk(at * rows, at * rows + n, 0, cols)).double().flatten() for at in range(parts)]
    return torch.nn.functional.normalize(torch.stack(read)).nan_to_num(0.0)


def _report_experts(pair: Pair, places: Sequence[int]) -> Finding:
    """Report experts in another order, or several times; ``places`` has the original's expert at each place."""
    experts, held = len(places), Counter(places)
    if len(held) == experts:
        order = describe_order(list(range(experts)), places, experts)
        message = f"{display(pair.name)}: its experts are in a different order ({order})"
        return make_finding("permuted", "error", pair.name, message, REMEDY, found=order, experts=list(places))
    wrong = [f"{at} holds {place}" for at, place in enumerate(places) if at != place]
    message = (
        f"{display(pair.name)}: experts repeat each other: {len(held)} of {count(experts, 'expert')} of the original "
        f"are left, the others are lost ({itemize(wrong, 3)})"
    )
    return make_finding("swapped_weight", "error", pair.name, message, REMEDY, experts=list(places))
