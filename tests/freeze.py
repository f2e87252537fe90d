"""The reports of all pairs that the suite of mutations makes, kept to see whether a change of the code changes any.

    PYTHONPATH=tests python tests/freeze.py keep before.jsonl.gz [JOB...]       # in one checkout
    PYTHONPATH=tests python tests/freeze.py compare before.jsonl.gz after.jsonl.gz [--tolerance 1e-12]

``keep`` compares and inspects the pairs of these jobs (``python -m mutation --list``; the beginning of a name is
enough), with the kernel that QUANTERR_KERNEL names. What differs from run to run is left out: times, paths and the
environment. ``compare`` prints every value that differs.
"""

import argparse
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from mutation.running import JOBS, run

import quanterr

TEMPORARY = re.compile(r"(/[\w.+-]+)*/tmp\w+/")  # paths of the suite's temporary folders, which also occur in messages
REPOSITORY = str(Path(__file__).parents[1])
CHANGING = ("run", "tool", "checksum")  # parts of a document that differ from run to run
MAX_SHOWN = 40


def main() -> int:
    """Return 1 if reports differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("keep")
    keep.add_argument("file", type=Path)
    keep.add_argument("jobs", nargs="*")
    against = commands.add_parser("compare")
    against.add_argument("before", type=Path)
    against.add_argument("after", type=Path)
    against.add_argument("--tolerance", type=float, default=0.0, help="relative difference of numbers")
    asked = parser.parse_args()
    if asked.command == "keep":
        write_reports(asked.file, asked.jobs)
        return 0
    return int(print_differences(read_reports(asked.before), read_reports(asked.after), asked.tolerance))


def write_reports(file: Path, jobs: list[str]) -> None:
    """Write a line for each job: its name and its documents in order."""
    names = [job.name for job in JOBS if not jobs or any(job.name.startswith(name) for name in jobs)]
    with (
        gzip.open(file, "wt", encoding="utf-8") as out,
        ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _begin) as pool,
    ):
        for name, documents in zip(names, pool.map(collect_documents, names), strict=True):
            out.write(json.dumps([name, documents]) + "\n")


def _begin() -> None:
    torch.set_num_threads(1)  # the jobs run in several processes


def collect_documents(job: str) -> list[Any]:
    """Return the documents of all comparisons and inspections in a job."""
    documents: list[Any] = []
    compare, inspect = quanterr.compare, quanterr.inspect

    def keep(make: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                document = make(*arguments, **options)
            except Exception as error:
                documents.append(TEMPORARY.sub("", f"{type(error).__name__}: {error}".replace(REPOSITORY, ".")))
                raise
            read = json.loads(TEMPORARY.sub("", document.to_json().replace(REPOSITORY, ".")))
            documents.append({key: value for key, value in read.items() if key not in CHANGING})
            return document

        return call

    quanterr.compare, quanterr.inspect = keep(compare), keep(inspect)
    try:
        run(job)
    finally:
        quanterr.compare, quanterr.inspect = compare, inspect
    return documents


def read_reports(file: Path) -> dict[str, list[Any]]:
    """Return the documents of each job."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return dict(json.loads(line) for line in lines)


def print_differences(before: dict[str, list[Any]], after: dict[str, list[Any]], tolerance: float) -> int:
    """Print the places where documents differ, and return their number."""
    shared = before.keys() & after.keys()
    differences = [f for name in sorted(shared) for f in find_differences(name, before[name], after[name], tolerance)]
    documents = sum(len(before[name]) for name in shared)
    print("\n".join(differences[:MAX_SHOWN]))
    print(f"{documents} documents of {len(shared)} jobs: {len(differences)} differences")
    print(f"jobs on one side only: {', '.join(sorted(before.keys() ^ after.keys())) or 'none'}")
    return len(differences)


def find_differences(place: str, before: Any, after: Any, tolerance: float) -> Iterator[str]:
    """Yield the places where two documents differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from find_differences(f"{place}.{key}", before.get(key), after.get(key), tolerance)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from find_differences(f"{place}[{number}]", *pair, tolerance)
    elif isinstance(before, float) and isinstance(after, float):
        if abs(before - after) > tolerance * max(abs(before), abs(after)):
            yield f"{place}: {before!r}, then {after!r}"
    elif before != after:
        yield f"{place}: {before!r}, then {after!r}"[:400]


if __name__ == "__main__":
    sys.exit(main())
