"""Small weights, whose values are kept after the pass over them, so that later steps need not read them again."""

from dataclasses import dataclass

from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.tensors.workspace import Workspace

MAX_ROUND_WEIGHTS = 64  # maximum number of weights that are compared before the first is finished
ROUND_ELEMENTS = 1 << 19  # number of elements of a round; more do not fit into the cache
MAX_KEPT_ELEMENTS = 1 << 14  # values of larger weights are not kept
BUFFER_ELEMENTS = ROUND_ELEMENTS + MAX_KEPT_ELEMENTS  # elements of each side in the buffer

Values = tuple[Tensor, Tensor]  # x and y, (r, c) each


@dataclass(slots=True)
class _Kept:
    """A small pair whose values are kept."""

    pair: Pair  # kept alive, as its id, which is the key, could otherwise be reused
    sides: Tensor | Values  # x and y; the pair's values are (n,) elements of each, from ``first`` on
    first: int = 0


class SmallWeights:
    """The values of the small weights that were compared last."""

    def __init__(self, workspace: Workspace) -> None:
        """Keep values in buffers of ``workspace``."""
        self._workspace = workspace
        self._kept: dict[int, _Kept] = {}  # by the pair's id
        self._before: dict[int, _Kept] = {}  # pairs of the previous round
        self._buffers = "kept", "kept before"  # the first is in use
        self._n = 0  # elements of one side in the buffer

    def turn(self) -> None:
        """Start a new round of weights; the values of the previous round are kept, and older ones dropped."""
        self._before, self._kept = self._kept, {}
        self._buffers, self._n = self._buffers[::-1], 0

    def keep(self, pair: Pair) -> tuple[int, int]:
        """Reserve space for both sides of a small pair, float32; return the addresses to which the kernel writes."""
        if self._n + pair.original.n > BUFFER_ELEMENTS:
            self._kept, self._n = {}, 0
        first, self._n = self._n, self._n + pair.original.n
        buffer = self._workspace.buffer(self._buffers[0], (2, BUFFER_ELEMENTS), torch.float32)
        self._kept[id(pair)] = _Kept(pair, buffer, first)
        x = buffer.data_ptr() + first * torch.float32.itemsize
        return x, x + BUFFER_ELEMENTS * torch.float32.itemsize

    def keep_copies(self, pair: Pair, x: Tensor, y: Tensor) -> None:
        """Keep copies of the values of a small pair, (r, c) each."""
        self._kept[id(pair)] = _Kept(pair, (_copy(x), _copy(y)))

    def values(self, pair: Pair) -> Values | None:
        """Return both sides of a pair, (r, c) each; None if they are not kept."""
        kept = self._kept.get(id(pair)) or self._before.get(id(pair))
        if kept is None:
            return None
        shape, stop = pair.original.matrix, kept.first + pair.original.n
        return kept.sides[0][kept.first : stop].view(shape), kept.sides[1][kept.first : stop].view(shape)


def _copy(values: Tensor) -> Tensor:
    """Return a copy as a vector, row by row, also of transposed values."""
    return values.clone(memory_format=torch.contiguous_format).view(-1)
