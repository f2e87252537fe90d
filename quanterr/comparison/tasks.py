"""Tasks: the pairs of several candidates that share one weight of the original, and are computed together."""

from collections.abc import Sequence
from typing import NamedTuple

from quanterr.pairing.model import Pair


class Job(NamedTuple):
    """One pair of a candidate; ``number`` is its index in the candidate's pairing."""

    candidate: int
    number: int
    pair: Pair


def group_by_original(plans: Sequence[Sequence[Pair]]) -> list[tuple[Job, ...]]:
    """Group the pairs of all candidates into tasks by the weight of the original that they share.

    A candidate that needs another view of the original, such as its transpose, gets a task of its own.
    """
    tasks: dict[tuple[str, tuple[int, ...]], list[list[Job]]] = {}
    for candidate, pairs in enumerate(plans):
        for number, pair in enumerate(pairs):
            alike = tasks.setdefault((pair.name, pair.original.shape), [])
            jobs = next((jobs for jobs in alike if jobs[0].pair.original is pair.original), None)
            if jobs is None:
                alike.append(jobs := [])
            jobs.append(Job(candidate, number, pair))
    return [tuple(jobs) for alike in tasks.values() for jobs in alike]
