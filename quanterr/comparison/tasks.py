"""What is worked on together: the pairs of several candidates that have one weight of the original in common."""

from collections.abc import Sequence
from typing import NamedTuple

from quanterr.pairing.plan import Pair


class Job(NamedTuple):
    """One pair: ``number`` is its place in the plan of that candidate."""

    candidate: int
    number: int
    pair: Pair


def group_by_original(plans: Sequence[Sequence[Pair]]) -> list[tuple[Job, ...]]:
    """All pairs of all candidates, those whose original is the same numbers in the same shape next to each other.

    Where a candidate needs the original otherwise, say transposed, its pair stands alone.
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
