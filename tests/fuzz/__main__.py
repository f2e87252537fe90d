"""Fuzz quanterr: python -m fuzz [TARGET...], in tests/. N is the number of inputs of each target."""

import argparse
import os
import sys
from pathlib import Path

from fuzz.running import Limits, lines_of, run
from fuzz.targets import TARGETS


def main() -> int:
    """Run the targets; 1 if there is a defect."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="fuzz", description="Give changed inputs to all that reads files.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)}; without any, all")
    parser.add_argument("-n", type=int, default=int(os.environ.get("N", 1_000_000)), help="inputs of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seconds", type=float, default=Limits().seconds, help="that one input may take")
    parser.add_argument("--memory", type=int, default=Limits().memory, help="MiB that a process may grow by")
    parser.add_argument("--saved", type=Path, default=Path(".fuzz"), help="where inputs go that show a defect")
    parser.add_argument("--input", type=Path, help="check this one file and nothing else, with one target")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(names):
        parser.error(f"no target is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [target for target in TARGETS if not given.targets or target.name in given.targets]
    if given.input:
        if len(chosen) != 1:
            parser.error("--input goes to one target: name it")
        print(chosen[0].check(given.input.read_bytes()))
        return 0
    defects = 0
    for target in chosen:
        finished = run(target, given.n, given.first, given.jobs, Limits(given.seconds, given.memory), given.saved)
        print("\n".join(lines_of(target, finished)), flush=True)
        defects += sum(finished.defects.values())
    if defects:
        print(f"{defects:,} defects; the inputs are in {given.saved}: python -m fuzz TARGET --input FILE")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
