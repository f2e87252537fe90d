"""The knapsack compared with brute force, and its bound on larger instances."""

from itertools import product
from math import exp
from random import Random

import pytest

from quanterr.util.knapsack import KnapsackItem, solve, trace_path


def small(random):
    """Return a few groups with a few choices, some of them with equal costs or sizes."""
    return [
        [
            KnapsackItem(random.randint(1, 60), random.choice([random.random(), float(random.randint(0, 20))]))
            for _ in range(random.randint(1, 4))
        ]
        for _ in range(random.randint(1, 6))
    ]


def test_2000_small_instances_are_solved_exactly():
    random = Random(1)
    for _ in range(2000):
        groups, budget = small(random), random.randint(5, 250)
        every = (picks for picks in product(*groups) if sum(choice.nbytes for choice in picks) <= budget)
        best = min((sum(choice.cost for choice in picks) for picks in every), default=None)
        solution = solve(groups, budget)
        if best is None:
            assert solution is None
            continue
        chosen = [group[pick] for group, pick in zip(groups, solution.picks, strict=True)]
        assert solution.nbytes == sum(choice.nbytes for choice in chosen) <= budget
        assert pytest.approx(best, abs=1e-9) == solution.cost == pytest.approx(sum(choice.cost for choice in chosen))
        assert solution.bound <= solution.cost


def large(n):
    random = Random(2)
    groups = []
    for _ in range(n):
        size, error = random.choice([2**18, 2**20, 2**22]), exp(random.gauss(0, 1.5))
        bits = (2.5, 3.5, 4.25, 4.5, 5.5, 6.5, 8.5, 16)
        groups.append([KnapsackItem(size * b / 8, error * 4**-b * random.uniform(0.7, 1.4)) for b in bits])
    return groups


@pytest.mark.parametrize("bits", [3, 4.5, 6])
def test_large_instances_are_within_a_narrow_bound(bits):
    groups = large(1000)
    budget = sum(group[0].nbytes for group in groups) / 2.5 * bits
    solution = solve(groups, budget)

    assert solution.nbytes <= budget
    assert solution.bound <= solution.cost <= solution.bound * 1.0001


def test_path_goes_from_smallest_to_best_through_optimal_points():
    groups = small(Random(3))
    points = trace_path(groups)

    assert sum(min(choice.nbytes for choice in group) for group in groups) == points[0].nbytes
    assert pytest.approx(sum(min(choice.cost for choice in group) for group in groups)) == points[-1].cost
    for point in points:
        assert pytest.approx(solve(groups, point.nbytes).cost) == point.cost


def test_path_ends_with_exactly_zero_cost():
    """A difference of sums would leave a rounding error, which moves the knee of a curve on a logarithmic axis."""
    random = Random(4)
    groups = [[KnapsackItem(1, random.random()), KnapsackItem(2, 0.0)] for _ in range(50)]
    last = trace_path(groups)[-2:]

    assert [min(bad.cost for bad, _ in groups), 0.0] == [point.cost for point in last]
