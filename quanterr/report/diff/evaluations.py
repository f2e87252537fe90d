"""What changed between two evaluations of the same tokens: plain data with a schema version."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import hypot
from typing import Literal

from quanterr.errors import UsageError
from quanterr.report.evaluation.model import SCORES, Evaluated, Evaluation, difference
from quanterr.report.evaluation.reading import read_evaluation
from quanterr.report.subjects import WIDTH
from quanterr.util.strict_json import JsonObject
from quanterr.util.text import display

SCHEMA = "quanterr.evaluation_diff"
SCHEMA_VERSION = "1.0"

Word = Literal["better", "worse", "unchanged"]

SAME = 0.01  # of an output error: a smaller change is none


@dataclass(slots=True)
class MetricChange:
    """A number of a candidate. ``chance``: whether the change is within 95 % of what other tokens would make of it."""

    metric: str
    old: float
    new: float
    change: float
    change_se: float | None  # standard error as if the tokens were not the same: rather too large; null: unknown
    chance: bool | None  # null: unknown
    word: Word


@dataclass(slots=True)
class WeightChange:
    """A weight's output error, which changed by more than 1 %."""

    layer: str
    old_output_error: float
    new_output_error: float
    ratio: float | None  # null: it was 0


@dataclass(slots=True)
class CandidateChange:
    """A candidate of both. Weights with the largest ratio come first."""

    name: str
    old_name: str
    old_verdict: str
    new_verdict: str
    old_bytes: int
    new_bytes: int
    metrics: list[MetricChange]
    worse: list[WeightChange]
    better: list[WeightChange]
    unchanged: int
    added: list[str]
    gone: list[str]


@dataclass(slots=True)
class EvaluationDiff:
    """All that changed. ``difference`` says why the numbers do not belong together, if that was forced."""

    schema: str
    schema_version: str
    old: str
    new: str
    difference: str | None
    candidates: list[CandidateChange]
    added: list[str]  # candidates
    gone: list[str]

    def to_dict(self) -> JsonObject:
        """Plain data for JSON."""
        return asdict(self)


def diff_of_evaluations(old: str, new: str, force: bool = False) -> EvaluationDiff:
    """What changed from one stored evaluation to a newer one of the same tokens. ``force`` compares others.

    Raises:
        UsageError: they are of other tokens or another dtype, and it is not forced.
        ReportError: a file that is missing, damaged or no evaluation.
    """
    before, after = read_evaluation(old), read_evaluation(new)
    why = difference(before, after)
    if why and not force:
        raise UsageError(f"{display(old)} cannot be compared with {display(new)}: {why}; --force compares them")
    pairs = _pairs(before, after)
    paired = [was.name for was, _ in pairs], [now.name for _, now in pairs]
    return EvaluationDiff(
        SCHEMA,
        SCHEMA_VERSION,
        old,
        new,
        why,
        [_changes(was, now) for was, now in pairs],
        added=[candidate.name for candidate in after.candidates if candidate.name not in paired[1]],
        gone=[candidate.name for candidate in before.candidates if candidate.name not in paired[0]],
    )


def _pairs(before: Evaluation, after: Evaluation) -> list[tuple[Evaluated, Evaluated]]:
    """Candidates of one name; or the only ones."""
    if len(before.candidates) == len(after.candidates) == 1:
        return [(before.candidates[0], after.candidates[0])]
    known = {candidate.name: candidate for candidate in before.candidates}
    return [(known[candidate.name], candidate) for candidate in after.candidates if candidate.name in known]


def _changes(was: Evaluated, now: Evaluated) -> CandidateChange:
    before = {weight.layer_name: weight.output_error for weight in was.weights}
    after = {weight.layer_name: weight.output_error for weight in now.weights}
    both = [
        WeightChange(name, x, y, y / x if x else None)
        for name, y in after.items()
        if y is not None and (x := before.get(name)) is not None
    ]
    worse = [item for item in both if item.new_output_error > item.old_output_error * (1 + SAME)]
    better = [item for item in both if item.new_output_error * (1 + SAME) < item.old_output_error]
    return CandidateChange(
        name=now.name,
        old_name=was.name,
        old_verdict=was.verdict,
        new_verdict=now.verdict,
        old_bytes=was.bytes,
        new_bytes=now.bytes,
        metrics=list(_metrics(was, now)),
        worse=sorted(worse, key=lambda item: -(item.ratio or float("inf"))),
        better=sorted(better, key=lambda item: item.ratio or 0.0),
        unchanged=len(both) - len(worse) - len(better),
        added=[name for name in after if name not in before],
        gone=[name for name in before if name not in after],
    )


def _metrics(was: Evaluated, now: Evaluated) -> Iterator[MetricChange]:
    for metric, score in SCORES.items():
        old, new = was.value(metric), now.value(metric)
        if old is None or new is None:
            continue
        errors = was.error(metric), now.error(metric)
        error = hypot(*(e for e in errors if e is not None)) if None not in errors else None
        chance = None if error is None else abs(new - old) <= WIDTH * error
        word: Word = "unchanged" if new == old else "better" if (new < old) == (score.better == "lower") else "worse"
        yield MetricChange(metric, old, new, new - old, error, chance, word)
