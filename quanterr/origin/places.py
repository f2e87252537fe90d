"""Elements of a weight that are not as expected: how many there are, in how many rows, and where the first ones are."""

from quanterr.lazy_torch import Tensor
from quanterr.tensors.chunks import Chunk

MAX_PLACES = 8  # rows of which a place is kept
MANY_STEPS = 3  # this many steps and more are counted together


class Places:
    """The count of such elements, chunk by chunk, from the first row on."""

    def __init__(self) -> None:
        """Start without elements."""
        self.n = self.rows = 0
        self.steps = [0] * MANY_STEPS  # elements that are 1, 2, and MANY_STEPS or more levels away
        self.first: list[tuple[int, int]] = []  # (row, column) of the first element in each of the first rows

    def add(self, chunk: Chunk, off: Tensor, steps: Tensor | None = None) -> None:
        """Add the elements of a chunk where ``off``, (r, c) bool; ``steps``, (r, c), has their distance in levels."""
        n = int(off.sum())
        if not n:
            return
        self.n += n
        rows = off.any(1).nonzero().view(-1)
        self.rows += len(rows)
        for row in rows[: MAX_PLACES - len(self.first)].tolist():
            self.first.append((chunk.row + row, chunk.col + int(off[row].nonzero()[0])))
        if steps is not None:
            found = steps[off].nan_to_num(nan=MANY_STEPS).clamp(1, MANY_STEPS).long()
            for number, count in enumerate(found.bincount(minlength=MANY_STEPS + 1).tolist()[1:]):
                self.steps[number] += count
