"""The speed of `quanterr sweep`, compared with a comparison, and of the knapsack of `plan`.

python tests/bench/sweep.py [--folder .bench] [--layers 16]
"""

import argparse
import random
import sys
import time
from math import exp
from pathlib import Path

from bench import COLS, ROWS, make, run

from quanterr.recipes.names import PRESETS
from quanterr.util.knapsack import KnapsackItem, solve

BITS = (2.5, 3.5, 4.25, 4.5, 5.5, 6.5, 8.5, 16)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--layers", type=int, default=16)
    given = parser.parse_args()
    given.folder = given.folder.resolve()
    paths = make(given.folder, given.layers, ROWS, COLS)
    original, elements = str(paths["original"]), given.layers * ROWS * COLS
    quanterr = [sys.executable, "-m", "quanterr"]
    options = ["-q", "--device", "cpu"]
    comparison = run(*quanterr, "compare", original, str(paths["fp8_tensor"]), *options)
    print(f"compare: {comparison.seconds:.2f} s, {comparison.peak_mb:.0f} MB")
    for recipe in PRESETS:
        sweep = run(*quanterr, "sweep", original, "--to", recipe, *options)
        speed = elements / sweep.seconds / 1e9
        print(f"{recipe}: {sweep.seconds:.2f} s, {speed:.3f} G weights/s with start-up, {sweep.peak_mb:.0f} MB")
    sweep = run(*quanterr, "sweep", original, *options)
    share = sweep.seconds / comparison.seconds
    print(f"{len(PRESETS)} recipes in one pass: {sweep.seconds:.2f} s, {share:.1f} × compare, {sweep.peak_mb:.0f} MB")
    for n in (1_000, 50_000):
        groups = instance(n)
        started = time.monotonic()
        solution = solve(groups, sum(group[0].nbytes for group in groups) / BITS[0] * 4.5)
        assert solution is not None
        gap = 1 - solution.bound / solution.cost
        print(f"plan of {n:,} layers × {len(BITS)} recipes: {time.monotonic() - started:.2f} s, within {gap:.1e}")


def instance(n: int) -> list[list[KnapsackItem]]:
    """Return layers of different sizes and sensitivities."""
    made = random.Random(1)
    groups = []
    for _ in range(n):
        size, error = made.choice([2**18, 2**20, 2**22]), exp(made.gauss(0, 1.5))
        groups.append([KnapsackItem(size * b / 8, error * 4**-b * made.uniform(0.7, 1.4)) for b in BITS])
    return groups


if __name__ == "__main__":
    main()
