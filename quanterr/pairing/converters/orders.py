"""Orders of rows and columns that converters change.

A converter sees the rows of a weight as a grid of blocks, (outer, inner) of ``unit`` rows each, and stores them as
(inner, outer):

    grid(2, 64)               the two halves of a head of 128 rows, stored in pairs (0, 64), (1, 65), …
    grid(8, 2, 128)           two value heads for each of 8 key heads, stored so that the key heads follow each other
    grid(4, 3, 64)            q, k and v of each of 4 heads, stored as all q, all k, all v
    grid(n, 2)                rows of gate and up in turn, stored as all rows of gate, then all of up
"""

from functools import cache
from math import gcd
from typing import NamedTuple


class Order(NamedTuple):
    """An order of rows: in each run of ``len(blocks)`` blocks, block b is stored at position ``blocks[b]``."""

    blocks: tuple[int, ...]
    unit: int = 1  # rows of a block
    columns: bool = False  # the order of columns, not of rows

    @property
    def run(self) -> int:
        """The number of rows after which the order repeats."""
        return len(self.blocks) * self.unit

    @property
    def is_partial(self) -> bool:
        """Return whether some blocks keep their place, so that their values are the same with and without the order."""
        return any(n == block for n, block in enumerate(self.blocks))

    @property
    def changes_nothing(self) -> bool:
        """Return whether all blocks keep their place."""
        return all(n == block for n, block in enumerate(self.blocks))

    @property
    def inverse(self) -> "Order":
        """The order that undoes this one."""
        return self._replace(blocks=tuple(sorted(range(len(self.blocks)), key=self.blocks.__getitem__)))


@cache  # all blocks of a model use the same order
def grid(outer: int, inner: int, unit: int = 1, columns: bool = False) -> Order:
    """Return the order of a grid of blocks, (outer, inner), that is stored as (inner, outer)."""
    return Order(tuple(i * outer + o for o in range(outer) for i in range(inner)), unit, columns)


@cache
def join_orders(*parts: Order | int) -> Order:
    """Return the order of parts that follow each other; a number stands for that many rows that keep their places.

    No part is repeated: together they are one run.
    """
    unit = gcd(*(part if isinstance(part, int) else part.unit for part in parts))
    blocks: list[int] = []
    for part in parts:
        first = len(blocks)
        if isinstance(part, int):
            blocks += range(first, first + part // unit)
        else:
            n = part.unit // unit
            blocks += [first + block * n + k for block in part.blocks for k in range(n)]
    return Order(tuple(blocks), unit)


@cache
def repeat_order(order: Order, times: int) -> Order:
    """Return the order of several runs as one, to join it with others."""
    n = len(order.blocks)
    return order._replace(blocks=tuple(run * n + block for run in range(times) for block in order.blocks))
