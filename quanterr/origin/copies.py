"""Tests whether an unquantized tensor holds the bits of the original, or of the original cast to its dtype.

y is x itself, or x rounded to the dtype of y, to nearest, ties to even; perhaps to 16 bits before, as programs load
models. An original of fewer digits than y is no such x: the other digits could hold anything.
"""

from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.tensors.casts import HALVES, CastTest, Copy, find_narrowest
from quanterr.tensors.workspace import find_dtype


class CopyTest:
    """Tests a tensor chunk by chunk, and keeps the casts that explain all chunks so far."""

    def __init__(self, pair: Pair) -> None:
        """Prepare the test of a pair whose sides are both plain numbers, or whose values were all equal."""
        self._ways: list[tuple[torch.dtype, ...]] = [()]
        self._computed: CastTest | None = None
        if pair.original.encoding == pair.quantized.encoding == "floats":
            x, y = (find_narrowest({e.dtype for e in side.parts.values()}) for side in (pair.original, pair.quantized))
            through = [find_dtype(half) for half in HALVES if half not in (x, y)]
            self._ways += [(find_dtype(y),), *((half, find_dtype(y)) for half in through)]
            if pair.original.computed or pair.quantized.computed:  # such as a norm plus one: rounded by float32
                self._computed = CastTest(x, y, computed=True)

    def find_differences(self, x: Tensor, y: Tensor) -> Tensor:
        """Return which elements of a chunk differ under every cast that explained all chunks so far, (r, c) bool."""
        if x.dtype != y.dtype:
            x, y = x.double(), y.double()
        differences = {way: _view_bits(_cast(x, way)) != _view_bits(y) for way in self._ways}
        left = [way for way, differ in differences.items() if not bool(differ.any())]
        if left:
            self._ways = left
            return torch.zeros_like(differences[left[0]])
        if self._computed is not None:
            self._computed.add(x, y)
            if self._computed.result == Copy.SAME:
                return torch.zeros_like(differences[self._ways[0]])
        return min(differences.values(), key=lambda differ: int(differ.sum()))


def _cast(x: Tensor, way: tuple[torch.dtype, ...]) -> Tensor:
    cast = x
    for dtype in way:
        cast = cast.to(dtype)
    return cast.to(x.dtype)


def _view_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int64 if values.dtype == torch.float64 else torch.int32)
