"""Detection and reversal of another order of experts, from the tensors alone.

A router selects experts by its rows. A program that reorders the experts of a block and the rows of the router in the
same way does not change what the model computes. The order is undone only if all weights of the experts, and the
router's biases, have the order of the router's rows; otherwise the model computes something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import torch
from quanterr.pairing.converters.orders import Order
from quanterr.pairing.model import Pair
from quanterr.pairing.sampling import CLEARLY, SAME, relative_error
from quanterr.pairing.views import reorder
from quanterr.tensors.chunks import Chunk

EXPERT_NAME = re.compile(r"(.+)\.experts\.(?:(\d+)\.)?(.+)")
ROUTER_NAME = re.compile(r"(.+)\.(?:gate|router)\.(?:\w+\.)?(\w+)")
# Minimum cosine of a router's row and the same row after quantization; different rows have less.
MIN_SAME_ROW_COSINE = 0.9


class _Block(NamedTuple):
    """The numbers of the pairs of one block of experts."""

    apart: dict[str, dict[int, int]]  # the rest of the name → expert → pair
    stacked: list[int]  # weights of all experts
    routers: list[int]


def restore_experts(pairs: list[Pair], reader: Reader) -> list[str]:
    """Pair experts, and rows of routers, that are in another order; return the names of the blocks' routers."""
    names = []
    for block in _find_blocks(pairs).values():
        router = next((n for n in block.routers if len(pairs[n].original.shape) == 2), None)
        places = [] if router is None else _find_places(pairs[router], reader)
        if router is not None and places and (changed := _move(pairs, block, places, reader)):
            for number, pair in changed.items():
                pairs[number] = pair
            names.append(pairs[router].name)
    return names


def _find_blocks(pairs: Sequence[Pair]) -> Mapping[str, _Block]:
    """Return the blocks with experts, by the path before them."""
    blocks: dict[str, _Block] = {}
    for number, pair in enumerate(pairs):
        if match := EXPERT_NAME.fullmatch(pair.name):
            block = blocks.setdefault(match[1], _Block({}, [], []))
            if match[2]:
                block.apart.setdefault(match[3], {})[int(match[2])] = number
            else:
                block.stacked.append(number)
    for number, pair in enumerate(pairs) if blocks else ():
        if (match := ROUTER_NAME.fullmatch(pair.name)) and match[1] in blocks:
            blocks[match[1]].routers.append(number)
    return blocks


def _find_places(router: Pair, reader: Reader) -> list[int]:
    """Return which row of the original each row of a router is; empty if they are in order, or other rows."""
    if router.original.shape != router.quantized.shape:
        return []
    x, y = (_read_directions(side, reader) for side in (router.original, router.quantized))
    if torch.equal(x, y):
        return []
    alike, places = (y @ x.T).max(1)
    in_order = torch.arange(len(x))
    places = torch.where((x * y).sum(1) >= alike, in_order, places)
    is_order = bool((alike > MIN_SAME_ROW_COSINE).all()) and torch.equal(places.sort().values, in_order)
    return places.tolist() if is_order and not torch.equal(places, in_order) else []


def _read_directions(weight: Weight, reader: Reader) -> torch.Tensor:
    rows, cols = weight.matrix
    values = reader.read(weight, Chunk(0, rows, 0, cols)).double()
    return torch.nn.functional.normalize(values).nan_to_num(0.0)


def _move(pairs: Sequence[Pair], block: _Block, places: Sequence[int], reader: Reader) -> dict[int, Pair]:
    """Return the pairs after each expert got its quantized weight; empty if some weight has another order."""
    experts = len(places)
    holders = [places.index(expert) for expert in range(experts)]
    moved = dict(_move_stacks(pairs, (*block.stacked, *block.routers), holders))
    for numbers in block.apart.values():
        if numbers.keys() != set(range(experts)):
            return {}
        for expert, holder in enumerate(holders):
            moved[numbers[expert]] = _give_codes(pairs[numbers[expert]], pairs[numbers[holder]])
    agree = all(_agrees(pairs[number], pair, reader) for number, pair in moved.items())
    return moved if agree and (block.apart or block.stacked) else {}


def _move_stacks(pairs: Sequence[Pair], numbers: Sequence[int], holders: Sequence[int]) -> Iterator[tuple[int, Pair]]:
    """Reorder the experts of stacked weights, or the rows of a router."""
    for number in numbers:
        pair = pairs[number]
        length = pair.original.matrix[1 if len(pair.original.shape) == 1 else 0]
        if length % len(holders) == 0:
            order = Order(tuple(holders), length // len(holders))
            yield number, replace(pair, quantized=reorder(pair.quantized, order))


def _give_codes(pair: Pair, other: Pair) -> Pair:
    """Return a pair with the quantized weight of another."""
    return replace(
        pair,
        quantized=other.quantized,
        quantized_codes=other.quantized_codes,
        quantized_consumed=other.quantized_consumed,
        contradiction=other.contradiction,
    )


def _agrees(before: Pair, after: Pair, reader: Reader) -> bool:
    """Return whether a quantized weight is clearly nearer to the original after the move, or exactly as near."""
    if before.quantized is after.quantized:
        return True
    if after.original.shape != after.quantized.shape:
        return False
    first, moved = (relative_error(pair.original, pair.quantized, reader) for pair in (before, after))
    return moved <= SAME or moved == first or CLEARLY * moved < first
