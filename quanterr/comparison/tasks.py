"""What is worked on together: the pairs of several candidates that have one weight of the original in common."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.formats import Weight
from quanterr.pairing.plan import Pair


class Job(NamedTuple):
    """One pair: ``number`` is its place in the plan of that candidate."""

    candidate: int
    number: int
    pair: Pair


def group_by_original(plans: Sequence[Sequence[Pair]]) -> list[tuple[Job, ...]]:
    """All pairs of all candidates, those whose original is the same numbers in the same shape side by side.

    Where a candidate needs the original otherwise, say transposed, its pair stands alone.
    """
    tasks: dict[tuple[str, tuple[int, ...]], list[list[Job]]] = {}
    for candidate, pairs in enumerate(plans):
        for number, pair in enumerate(pairs):
            alike = tasks.setdefault((pair.name, pair.original.shape), [])
            jobs = next((jobs for jobs in alike if _same_weight(jobs[0].pair.original, pair.original)), None)
            if jobs is None:
                alike.append(jobs := [])
            jobs.append(Job(candidate, number, pair))
    return [tuple(jobs) for alike in tasks.values() for jobs in alike]


def _same_weight(a: Weight, b: Weight) -> bool:
    return a is b or (a.shape == b.shape and a.needs_float64 == b.needs_float64 and _same(a.dequantize, b.dequantize))


def _same(a: object, b: object) -> bool:
    """Whether two ways to dequantize, or what they are made of, are the same; whatever is not known here is not."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, partial) and isinstance(b, partial):
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if is_dataclass(a):
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return isinstance(a, str | int | float) and a == b
