"""Tests which of two candidates is nearer to the original, by a paired test over the chunks that both read."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from quanterr.documents.evaluation.model import Evaluated, Evaluation
from quanterr.util.student import compute_p_value

MIN_CHUNKS = 5  # with fewer, the test has no power, and its p-value misleads


class PairedDifference(NamedTuple):
    """The difference of the mean KL divergence of two candidates over the same chunks."""

    mean: float  # second minus first [nat]
    error: float  # standard error [nat]
    p: float  # p-value, two-sided


def compare_paired(first: Sequence[float], second: Sequence[float]) -> PairedDifference | None:
    """Return the result of a paired t-test over chunks; None for fewer than ``MIN_CHUNKS`` chunks or equal values."""
    each = [b - a for a, b in zip(first, second, strict=True)]
    if len(each) < MIN_CHUNKS or not any(each):
        return None
    mean, error = fmean(each), stdev(each) / sqrt(len(each))
    return PairedDifference(mean, error, compute_p_value(abs(mean) / error, len(each) - 1) if error else 0.0)


def compare_neighbours(evaluation: Evaluation) -> list[tuple[Evaluated, Evaluated, PairedDifference]]:
    """Return the pairs of candidates next to each other when sorted by divergence, if both read the same chunks."""
    scored = [
        candidate for candidate in evaluation.candidates if candidate.scores is not None and candidate.scores.kld_chunks
    ]
    scored.sort(key=lambda candidate: candidate.scores.kld_mean if candidate.scores else 0.0)
    neighbours = []
    for near, far in pairwise(scored):
        if near.scores and far.scores and len(near.scores.kld_chunks) == len(far.scores.kld_chunks):
            apart = compare_paired(near.scores.kld_chunks, far.scores.kld_chunks)
            neighbours += [(near, far, apart)] if apart is not None else []
    return neighbours
