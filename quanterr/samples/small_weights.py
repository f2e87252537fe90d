"""Small weights: their values are kept after the pass, to examine them without another read."""

from dataclasses import dataclass

from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.model import Pair
from quanterr.tensors.workspace import Workspace

AT_ONCE = 64  # most weights to compare before the first is finished
ENOUGH = 1 << 19  # elements in a round; more do not fit the cache
MOST_KEPT = 1 << 14  # elements up to which values are kept, to avoid another read
ROOM = ENOUGH + MOST_KEPT  # elements that are kept of each side

Values = tuple[Tensor, Tensor]  # x and y, (r, c) each


@dataclass(slots=True)
class _Kept:
    """A small pair whose values are kept."""

    pair: Pair  # kept alive because its id is the key, which another object might get otherwise
    sides: Tensor | Values  # x and y; the pair's values are (n,) elements of each, from ``first`` on
    first: int = 0


class SmallWeights:
    """The values of the small weights that were compared last."""

    def __init__(self, workspace: Workspace) -> None:
        """Keep values in buffers of ``workspace``."""
        self._workspace = workspace
        self._kept: dict[int, _Kept] = {}  # by the pair's id
        self._before: dict[int, _Kept] = {}  # the pairs kept before the last turn
        self._buffers = "kept", "kept before"  # the first is in use
        self._n = 0  # elements of one side in the buffer

    def turn(self) -> None:
        """Start a new round of weights: keep the values of the previous round, and drop older ones."""
        self._before, self._kept = self._kept, {}
        self._buffers, self._n = self._buffers[::-1], 0

    def keep(self, pair: Pair) -> tuple[int, int]:
        """Reserve space for both sides of a small pair, float32; return the addresses for the kernel to write to."""
        if self._n + pair.original.n > ROOM:
            self._kept, self._n = {}, 0
        first, self._n = self._n, self._n + pair.original.n
        buffer = self._workspace.buffer(self._buffers[0], (2, ROOM), torch.float32)
        self._kept[id(pair)] = _Kept(pair, buffer, first)
        x = buffer.data_ptr() + first * torch.float32.itemsize
        return x, x + ROOM * torch.float32.itemsize

    def keep_copies(self, pair: Pair, x: Tensor, y: Tensor) -> None:
        """Keep copies of the values of a small pair, (r, c) each."""
        self._kept[id(pair)] = _Kept(pair, (x.clone().view(-1), y.clone().view(-1)))

    def values(self, pair: Pair) -> Values | None:
        """Return both sides of a pair, (r, c) each; None if they are not kept."""
        kept = self._kept.get(id(pair)) or self._before.get(id(pair))
        if kept is None:
            return None
        shape, stop = pair.original.matrix, kept.first + pair.original.n
        return kept.sides[0][kept.first : stop].view(shape), kept.sides[1][kept.first : stop].view(shape)
