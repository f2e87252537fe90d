"""Counts the elements of a weight that are not as expected, and their rows, and keeps the places of the first ones."""

from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk

MAX_PLACES = 8  # rows of which a place is kept
MANY_STEPS = 3  # this many steps and more are counted together


class Places:
    """Counts such elements, chunk by chunk, from the first row on."""

    def __init__(self) -> None:
        """Start without elements."""
        self.n = self.rows = 0
        self.steps = [0] * MANY_STEPS  # elements that are 1, 2, and MANY_STEPS or more levels away
        self.first: list[tuple[int, int]] = []  # (row, column) of the first element in each of the first rows

    def add(self, chunk: Chunk, places: Tensor, steps: Tensor | None = None) -> None:
        """Add elements of a chunk by their (row, column) in the chunk, (n, 2), in order.

        ``steps``, (n,), are their distances in levels.
        """
        if not len(places):
            return
        self.n += len(places)
        rows = places[:, 0]
        begins = torch.cat([rows.new_zeros(1), (rows.diff() != 0).nonzero().view(-1) + 1])
        self.rows += len(begins)
        for row, col in places[begins[: MAX_PLACES - len(self.first)]].tolist():
            self.first.append((chunk.row + row, chunk.col + col))
        if steps is not None:
            each = steps.nan_to_num(nan=MANY_STEPS).clamp(1, MANY_STEPS).long()
            for number, count in enumerate(each.bincount(minlength=MANY_STEPS + 1).tolist()[1:]):
                self.steps[number] += count
