"""Iterates over the weights that a comparison pairs, as tensors, so that users can compute further metrics."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from quanterr.checkpoints import Checkpoint, open_checkpoints
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor
from quanterr.options import PairOptions
from quanterr.options.keywords import accept_fields_of
from quanterr.pairing import pair
from quanterr.pairing.alternatives import choose_alternatives
from quanterr.pairing.model import Bucket, Pair
from quanterr.tensors.in_memory import Side, hold_all
from quanterr.util.text import count
from quanterr.util.waiting import notices

LEFT_OUT_BUCKETS = (Bucket.CONSUMED, Bucket.FILTERED_OUT)  # tensors that a comparison leaves out without reporting them


class TensorPair(NamedTuple):
    """A weight of both sides, in the original's shape: float32, or float64 where float32 would round the values."""

    name: str
    original: Tensor
    dequantized: Tensor


@accept_fields_of(PairOptions)
def iterate_pairs(original: Side, quantized: Side, **options: Any) -> Iterator[TensorPair]:
    """Pair the weights of two checkpoints as ``compare`` does, and return an iterator over their values.

    >>> for name, x, y in quanterr.iterate_pairs("original", "fp8"):  # doctest: +SKIP
    ...     print(name, torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0))

    Changes that a converter or quantizer made to names, orders and numbers are undone. Tensors that cannot be
    compared, or only for equality, are left out, and their number is logged: ``compare`` lists them.

    Raises:
        UsageError: a pattern matches nothing.
        CheckpointError: an input is missing, damaged, or changes while it is read.
    """
    asked = PairOptions(**options)
    with ExitStack() as stack:
        sides = stack.enter_context(open_checkpoints(hold_all([original, quantized]), asked.lenient, asked.cache))
        pairing = choose_alternatives(pair(sides[0], sides[1], asked.selection))
        numbers = [matched for matched in pairing.pairs if _is_of_numbers(matched)]
        lost = len([leftover for leftover in pairing.leftovers if leftover.bucket not in LEFT_OUT_BUCKETS])
        lost += len(pairing.pairs) - len(numbers)
        if lost:
            notices.warning("%s left out; compare lists them", count(lost, "tensor"))
        return _read_pairs(numbers, sides, stack.pop_all())


def _is_of_numbers(pair: Pair) -> bool:
    """Return whether both sides have numbers, rather than bits that can only be compared for equality."""
    return all(side.encoding != "bits" and side.refusal is None for side in (pair.original, pair.quantized))


def _read_pairs(pairs: Sequence[Pair], sides: Sequence[Checkpoint], stack: ExitStack) -> Iterator[TensorPair]:
    with stack:
        for pair in pairs:
            reader = Reader()  # a new one for each pair: its buffers do not fit the next pair
            x, y = (reader.read_whole(weight, side) for side, weight in enumerate((pair.original, pair.quantized)))
            yield TensorPair(pair.name, x.view(pair.original.shape), y.view(pair.original.shape))
        for side in sides:
            side.check_unchanged()
