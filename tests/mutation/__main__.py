"""Run all families or the named ones; count noticed losses and print silent ones."""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from mutation.judging import BAD, Outcome, table
from mutation.running import JOBS, run

NOTED = 0.01  # largest share of losses that count and are only an info
WARNED = 0.003  # largest share of sound pairs with warnings


def main() -> int:
    """Return status 1 if a loss that counts is silent, too many are infos, or sound pairs have errors or warnings."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m mutation")
    parser.add_argument("jobs", nargs="*", help="names of jobs (--list); the beginning is enough")
    parser.add_argument("--list", action="store_true", help="list them")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep pairs there that are judged badly")
    asked = parser.parse_args()
    started = time.monotonic()
    names = [job.name for job in JOBS if not asked.jobs or any(job.name.startswith(name) for name in asked.jobs)]
    if asked.list:
        print("\n".join(names))
        return 0
    outcomes: list[Outcome] = []
    one_thread = partial(torch.set_num_threads, 1)  # there are several processes
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), one_thread) as pool:
        for outcomes_of_job in pool.map(partial(run, keep=asked.keep), names):
            outcomes += outcomes_of_job
            for outcome in outcomes_of_job:
                if outcome.told in (*BAD, "by design"):
                    print(outcome, flush=True)
    print(table(outcomes, "family", lambda outcome: outcome.family))
    print(table(outcomes, "excuse", lambda outcome: outcome.excuse))
    print(f"{time.monotonic() - started:.0f} s")
    return verdict(outcomes)


def verdict(outcomes: list[Outcome]) -> int:
    """Print the criteria, and return 1 unless they are met."""
    counted = sum(bool(outcome.loss and outcome.loss.counts) and outcome.told != "by design" for outcome in outcomes)
    sound = [outcome for outcome in outcomes if outcome.loss is None]
    silent, noted = (sum(outcome.told == label for outcome in outcomes) for label in ("SILENT", "info"))
    errors, warned = (sum(outcome.told == label for outcome in sound) for label in ("ERROR", "WARNED"))
    print(f"losses of 1 dB of a layer, 6 dB of a part, or structural: {counted}")
    print(f"silent of these: {silent} (0), with an info alone: {noted} (1 %)")
    print(f"sound pairs: {len(sound)}, called an error: {errors} (0), with a warning: {warned} (0.3 %)")
    return int(bool(silent or errors or noted > NOTED * counted or warned > WARNED * len(sound)))


if __name__ == "__main__":
    sys.exit(main())
