"""Which of two candidates of one run is nearer to the original: a paired test over the chunks that both read."""

from collections.abc import Sequence
from itertools import pairwise
from math import atan, cos, pi, sin, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from quanterr.report.evaluation.model import Evaluated, Evaluation


class Difference(NamedTuple):
    """Of the mean divergence of two candidates on the same chunks."""

    mean: float  # of the second less the first [nat]
    error: float  # standard error [nat]
    p: float  # that such a difference, or a larger one, is chance: two-sided


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """By Student's t of the differences chunk by chunk; None of fewer than two chunks, or of two that are the same."""
    each = [b - a for a, b in zip(first, second, strict=True)]
    if len(each) < 2 or not any(each):
        return None
    mean, error = fmean(each), stdev(each) / sqrt(len(each))
    return Difference(mean, error, two_sided_p(abs(mean) / error, len(each) - 1) if error else 0.0)


def two_sided_p(t: float, freedom: int) -> float:
    """The probability of a Student's t beyond ±t, of whole degrees of freedom.

    Reference: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = atan(t / sqrt(freedom))
    square, term, total = cos(angle) ** 2, 1.0, 1.0
    start = 2 if freedom % 2 == 0 else 3
    for k in range(start, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if freedom % 2 == 0:
        within = sin(angle) * total
    else:
        within = 2 / pi * (angle + (sin(angle) * cos(angle) * total if freedom > 1 else 0.0))
    return min(max(1 - within, 0.0), 1.0)


def neighbours(evaluation: Evaluation) -> list[tuple[Evaluated, Evaluated, Difference]]:
    """Each candidate and the next nearest one, the nearest first, where both read the same chunks."""
    scored = [one for one in evaluation.candidates if one.scores is not None and one.scores.kld_chunks]
    scored.sort(key=lambda one: one.scores.kld_mean if one.scores else 0.0)
    found = []
    for near, far in pairwise(scored):
        if near.scores and far.scores and len(near.scores.kld_chunks) == len(far.scores.kld_chunks):
            apart = difference(near.scores.kld_chunks, far.scores.kld_chunks)
            found += [(near, far, apart)] if apart is not None else []
    return found
