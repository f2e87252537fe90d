"""A multiple-choice knapsack: one choice in each group, the least cost within a budget of bytes.

    1  the lower convex hull of each group's choices; all steps on all hulls by their gain per byte
    2  steps are taken while they fit: without the last, broken step this is optimal for the bytes that it uses. Where
       that step would be taken in part, is the bound that no solution can beat (the linear relaxation)
    3  with the price of a byte there, a choice has a reduced cost: what it costs beyond the best of its group. Choices
       that cost more than lies between bound and solution are in no better solution; combinations of all others are
       searched, the cheapest first, where one that is worse in bytes and cost is dropped

So small instances are solved exactly, large ones within the bound that is returned.

Reference: Kellerer, Pferschy, Pisinger: Knapsack Problems (2004), chapter 11.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import fsum
from typing import NamedTuple

STATES = 2_000  # partial solutions that are kept
WORK = 500_000  # partial solutions that are made in all


class Choice(NamedTuple):
    """What a group may be."""

    nbytes: float
    cost: float


class Solution(NamedTuple):
    """A choice for each group, by its place."""

    picks: list[int]
    nbytes: float
    cost: float
    bound: float  # no solution costs less


class _Step(NamedTuple):
    """From one choice on a hull to the next."""

    price: float  # bytes for each unit of cost that goes away
    group: int
    to: int
    nbytes: float


def solve(groups: Sequence[Sequence[Choice]], budget: float) -> Solution | None:
    """The least cost within ``budget``; None where even the smallest choices exceed it."""
    hulls = [_hull(choices) for choices in groups]
    picks = [hull[0] for hull in hulls]
    room = budget - fsum(groups[n][pick].nbytes for n, pick in enumerate(picks))
    if room < 0:
        return None
    broken = _take(groups, picks, sorted(_steps(groups, hulls)), room)
    cost, used = _sums(groups, picks)
    if broken is None:
        return Solution(picks, used, cost, cost)
    price = 1 / broken.price if broken.price else 0.0  # cost of a byte
    reduced = [[cost + price * nbytes for nbytes, cost in choices] for choices in groups]
    bound = fsum(map(min, reduced)) - price * budget  # bytes beyond the budget bought, those left sold, at this price
    _fill(groups, picks, budget - used)
    best, is_all = _search(groups, reduced, picks, price, bound, budget)
    cost, used = _sums(groups, best)
    return Solution(best, used, cost, cost if is_all else min(bound, cost))


def _hull(choices: Sequence[Choice]) -> list[int]:
    """Places of the choices on the lower convex hull, the smallest first."""
    found: list[int] = []
    for place in sorted(range(len(choices)), key=choices.__getitem__):
        own = choices[place]
        if found and own.cost >= choices[found[-1]].cost:
            continue
        while len(found) > 1 and _above(choices[found[-2]], choices[found[-1]], own):
            found.pop()
        found.append(place)
    return found


def _above(first: Choice, middle: Choice, last: Choice) -> bool:
    """Whether the middle one is not below the line from the first to the last."""
    rise = (first.cost - middle.cost) * (last.nbytes - first.nbytes)
    return rise <= (first.cost - last.cost) * (middle.nbytes - first.nbytes)


def _steps(groups: Sequence[Sequence[Choice]], hulls: Sequence[Sequence[int]]) -> list[_Step]:
    found = []
    for group, hull in enumerate(hulls):
        choices = groups[group]
        for place, to in pairwise(hull):
            nbytes = choices[to].nbytes - choices[place].nbytes
            found.append(_Step(nbytes / (choices[place].cost - choices[to].cost), group, to, nbytes))
    return found


def _take(groups: Sequence[Sequence[Choice]], picks: list[int], steps: Sequence[_Step], room: float) -> _Step | None:
    """Take steps while they fit; the first that does not."""
    for step in steps:
        if step.nbytes > room:
            return step
        picks[step.group] = step.to
        room -= step.nbytes
    return None


def _sums(groups: Sequence[Sequence[Choice]], picks: Sequence[int]) -> tuple[float, float]:
    chosen = [groups[n][pick] for n, pick in enumerate(picks)]
    return fsum(choice.cost for choice in chosen), fsum(choice.nbytes for choice in chosen)


def _fill(groups: Sequence[Sequence[Choice]], picks: list[int], room: float) -> None:
    """Use the room that is left: in each group, the largest gain first, the best choice that fits."""
    gains = []
    for group, choices in enumerate(groups):
        own, most = choices[picks[group]], choices[picks[group]].nbytes + room
        best = min((cost, place) for place, (nbytes, cost) in enumerate(choices) if nbytes <= most)
        if best[0] < own.cost:
            gains.append((best[0] - own.cost, group, best[1]))
    for _, group, place in sorted(gains):
        needed = groups[group][place].nbytes - groups[group][picks[group]].nbytes
        if needed <= room:
            picks[group], room = place, room - needed


class _State(NamedTuple):
    """Choices that differ from those of least reduced cost, as a list from the last to the first."""

    nbytes: float
    reduced: float
    changes: "tuple[int, int, object] | None"  # group, place, those before


def _search(
    groups: Sequence[Sequence[Choice]],
    reduced: Sequence[Sequence[float]],
    picks: list[int],
    price: float,
    bound: float,
    budget: float,
) -> tuple[list[int], bool]:
    """The best combination of choices of little reduced cost, or ``picks``; and whether there can be no better one."""
    least = [costs.index(min(costs)) for costs in reduced]
    cost, _ = _sums(groups, picks)
    gap = cost - bound
    others: list[tuple[float, int, list[tuple[int, float, float]]]] = []
    for group, costs in enumerate(reduced):
        own, choices = least[group], groups[group]
        limit = costs[own] + gap
        near = [
            (place, choices[place].nbytes - choices[own].nbytes, price_of - costs[own])
            for place, price_of in enumerate(costs)
            if price_of < limit and place != own
        ]
        if near:
            others.append((min(change[2] for change in near), group, near))
    _, used = _sums(groups, least)
    states, work, is_all = [_State(0.0, 0.0, None)], 0, True
    for _, group, near in sorted(others, key=lambda item: item[:2]):
        work += len(states) * (len(near) + 1)
        if work > WORK:
            is_all = False
            break
        made = [
            _State(state.nbytes + nbytes, state.reduced + reduced, (group, place, state.changes))
            for state in states
            for place, nbytes, reduced in near
            if state.reduced + reduced < gap
        ]
        states = _undominated([*states, *made], price)
        if len(states) > STATES:
            states, is_all = sorted(states, key=lambda state: state.reduced)[:STATES], False
    room = budget - used
    fitting = [state for state in states if state.nbytes <= room]
    if not fitting:
        return picks, is_all
    best = min(fitting, key=lambda state: state.reduced - price * state.nbytes)
    found = list(least)
    changes: tuple[int, int, object] | None = best.changes
    while changes is not None:
        found[changes[0]] = changes[1]
        changes = changes[2]  # type: ignore[assignment] # a tuple like this, or None
    return found if _sums(groups, found) < (cost, 0.0) else picks, is_all


def _undominated(states: list[_State], price: float) -> list[_State]:
    """Those that no other beats in bytes and cost."""
    found: list[_State] = []
    least = float("inf")
    for state in sorted(states, key=lambda one: (one.nbytes, one.reduced - price * one.nbytes)):
        cost = state.reduced - price * state.nbytes
        if cost < least:
            found.append(state)
            least = cost
    return found


def path(groups: Sequence[Sequence[Choice]]) -> list[Choice]:
    """Bytes and cost from the smallest choices on, step by step: each has the least cost for its bytes."""
    hulls = [_hull(choices) for choices in groups]
    picks = [hull[0] for hull in hulls]
    cost, nbytes = _sums(groups, picks)
    found = [Choice(nbytes, cost)]
    for step in sorted(_steps(groups, hulls)):
        cost -= groups[step.group][picks[step.group]].cost - groups[step.group][step.to].cost
        nbytes += step.nbytes
        picks[step.group] = step.to
        found.append(Choice(nbytes, max(cost, 0.0)))
    return found
