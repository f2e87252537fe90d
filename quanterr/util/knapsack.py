"""The multiple-choice knapsack: one item from each group, at the minimum total cost within a budget of bytes.

    1  Find the lower convex hull of each group's items, and sort the steps on all hulls by their gain per byte.
    2  Take steps while they fit. The result is optimal for the bytes that it uses. If the first step that does not fit
       (the broken step) is taken in part, the result is the linear relaxation, whose cost is a lower bound.
    3  The broken step determines a price per byte, and so a reduced cost of each item, which is its cost at that price
       beyond the best item of its group. An item whose reduced cost exceeds the gap between bound and solution cannot
       be in a better solution. Search the combinations of the other items, and drop those that are worse in bytes and
       cost.

Small instances are solved exactly, large ones to within the returned bound.

Reference: Kellerer, Pferschy, Pisinger: Knapsack Problems (2004), chapter 11.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import fsum
from typing import NamedTuple

MAX_STATES = 2_000  # maximum number of partial solutions that are kept
MAX_WORK = 500_000  # maximum number of partial solutions that are examined


class KnapsackItem(NamedTuple):
    """One item of a group: its size in bytes and its cost."""

    nbytes: float
    cost: float


class Solution(NamedTuple):
    """One item for each group: ``picks`` are indices into the groups."""

    picks: list[int]
    nbytes: float
    cost: float
    bound: float  # no solution costs less


class _HullStep(NamedTuple):
    """A step from one item on a group's hull to the next, which is larger and costs less."""

    price: float  # bytes per unit of cost saved
    group: int
    to: int
    nbytes: float


def solve(groups: Sequence[Sequence[KnapsackItem]], budget: float) -> Solution | None:
    """Return the cheapest selection that is found within ``budget`` bytes; None if the smallest items do not fit."""
    hulls = [_find_hull(choices) for choices in groups]
    picks = [hull[0] for hull in hulls]
    room = budget - fsum(groups[n][pick].nbytes for n, pick in enumerate(picks))
    if room < 0:
        return None
    broken = _take(groups, picks, sorted(_list_steps(groups, hulls)), room)
    cost, used = _sum_up(groups, picks)
    if broken is None:
        return Solution(picks, used, cost, cost)
    price = 1 / broken.price if broken.price else 0.0  # cost per byte
    reduced = [[cost + price * nbytes for nbytes, cost in choices] for choices in groups]
    # As if further bytes could be bought, and unused ones sold, at this price.
    bound = fsum(map(min, reduced)) - price * budget
    _fill(groups, picks, budget - used)
    best, is_all = _search(groups, reduced, picks, price, bound, budget)
    cost, used = _sum_up(groups, best)
    return Solution(best, used, cost, cost if is_all else min(bound, cost))


def _find_hull(choices: Sequence[KnapsackItem]) -> list[int]:
    """Return the indices of the items on the lower convex hull, the smallest item first."""
    hull: list[int] = []
    for place in sorted(range(len(choices)), key=choices.__getitem__):
        item = choices[place]
        if hull and item.cost >= choices[hull[-1]].cost:
            continue
        while len(hull) > 1 and _is_above(choices[hull[-2]], choices[hull[-1]], item):
            hull.pop()
        hull.append(place)
    return hull


def _is_above(first: KnapsackItem, middle: KnapsackItem, last: KnapsackItem) -> bool:
    """Return whether the middle item is on or above the line from the first to the last."""
    rise = (first.cost - middle.cost) * (last.nbytes - first.nbytes)
    return rise <= (first.cost - last.cost) * (middle.nbytes - first.nbytes)


def _list_steps(groups: Sequence[Sequence[KnapsackItem]], hulls: Sequence[Sequence[int]]) -> list[_HullStep]:
    steps = []
    for group, hull in enumerate(hulls):
        choices = groups[group]
        for place, to in pairwise(hull):
            nbytes = choices[to].nbytes - choices[place].nbytes
            steps.append(_HullStep(nbytes / (choices[place].cost - choices[to].cost), group, to, nbytes))
    return steps


def _take(
    groups: Sequence[Sequence[KnapsackItem]], picks: list[int], steps: Sequence[_HullStep], room: float
) -> _HullStep | None:
    """Take steps in order while they fit, updating ``picks``; return the first that does not fit, if any."""
    for step in steps:
        if step.nbytes > room:
            return step
        picks[step.group] = step.to
        room -= step.nbytes
    return None


def _sum_up(groups: Sequence[Sequence[KnapsackItem]], picks: Sequence[int]) -> tuple[float, float]:
    chosen = [groups[n][pick] for n, pick in enumerate(picks)]
    return fsum(choice.cost for choice in chosen), fsum(choice.nbytes for choice in chosen)


def _fill(groups: Sequence[Sequence[KnapsackItem]], picks: list[int], room: float) -> None:
    """Use the remaining bytes by replacing items with the cheapest that fits, the largest gain first."""
    gains = []
    for group, choices in enumerate(groups):
        chosen, max_bytes = choices[picks[group]], choices[picks[group]].nbytes + room
        best = min((cost, place) for place, (nbytes, cost) in enumerate(choices) if nbytes <= max_bytes)
        if best[0] < chosen.cost:
            gains.append((best[0] - chosen.cost, group, best[1]))
    for _, group, place in sorted(gains):
        needed = groups[group][place].nbytes - groups[group][picks[group]].nbytes
        if needed <= room:
            picks[group], room = place, room - needed


class _State(NamedTuple):
    """A partial solution: a linked list of changes to the items with the smallest reduced cost, the latest first."""

    nbytes: float
    reduced: float
    changes: "tuple[int, int, object] | None"  # group, index of the item, earlier changes


def _search(
    groups: Sequence[Sequence[KnapsackItem]],
    reduced: Sequence[Sequence[float]],
    picks: list[int],
    price: float,
    bound: float,
    budget: float,
) -> tuple[list[int], bool]:
    """Return the best combination that is found, or ``picks`` if none is better, and whether it is proved optimal."""
    best_places = [costs.index(min(costs)) for costs in reduced]
    cost, _ = _sum_up(groups, picks)
    gap = cost - bound
    others: list[tuple[float, int, list[tuple[int, float, float]]]] = []
    for group, costs in enumerate(reduced):
        best_place, choices = best_places[group], groups[group]
        limit = costs[best_place] + gap
        near = [
            (place, choices[place].nbytes - choices[best_place].nbytes, price_of - costs[best_place])
            for place, price_of in enumerate(costs)
            if price_of < limit and place != best_place
        ]
        if near:
            others.append((min(change[2] for change in near), group, near))
    _, used = _sum_up(groups, best_places)
    states, work, is_all = [_State(0.0, 0.0, None)], 0, True
    for _, group, near in sorted(others, key=lambda item: item[:2]):
        work += len(states) * (len(near) + 1)
        if work > MAX_WORK:
            is_all = False
            break
        made = [
            _State(state.nbytes + nbytes, state.reduced + reduced, (group, place, state.changes))
            for state in states
            for place, nbytes, reduced in near
            if state.reduced + reduced < gap
        ]
        states = _drop_dominated([*states, *made], price)
        if len(states) > MAX_STATES:
            states, is_all = sorted(states, key=lambda state: state.reduced)[:MAX_STATES], False
    room = budget - used
    fitting = [state for state in states if state.nbytes <= room]
    if not fitting:
        return picks, is_all
    best = min(fitting, key=lambda state: state.reduced - price * state.nbytes)
    combination = list(best_places)
    changes: tuple[int, int, object] | None = best.changes
    while changes is not None:
        combination[changes[0]] = changes[1]
        changes = changes[2]  # type: ignore[assignment] # a tuple like this, or None
    return combination if _sum_up(groups, combination) < (cost, 0.0) else picks, is_all


def _drop_dominated(states: list[_State], price: float) -> list[_State]:
    """Return the states that no other state beats in both bytes and cost."""
    kept: list[_State] = []
    min_cost = float("inf")
    for state in sorted(states, key=lambda each: (each.nbytes, each.reduced - price * each.nbytes)):
        cost = state.reduced - price * state.nbytes
        if cost < min_cost:
            kept.append(state)
            min_cost = cost
    return kept


def trace_path(groups: Sequence[Sequence[KnapsackItem]]) -> list[KnapsackItem]:
    """Return total bytes and cost after each hull step, from the smallest items on: the minimum for these bytes."""
    hulls = [_find_hull(choices) for choices in groups]
    picks = [hull[0] for hull in hulls]
    _, nbytes = _sum_up(groups, picks)
    sizes, gains = [nbytes], []
    for step in sorted(_list_steps(groups, hulls)):
        gains.append(groups[step.group][picks[step.group]].cost - groups[step.group][step.to].cost)
        sizes.append(sizes[-1] + step.nbytes)
        picks[step.group] = step.to
    cheapest, _ = _sum_up(groups, picks)
    # Added up from the end, as sums of positive numbers are accurate, and differences near 0 would be mostly rounding.
    costs = list(accumulate(reversed(gains), initial=cheapest))[::-1]
    return [KnapsackItem(*point) for point in zip(sizes, costs, strict=True)]
