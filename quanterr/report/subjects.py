"""What rules see of a document: its subjects, the items below them, and which numbers these have.

A subject is what gets a verdict: a report, a plan, a candidate of a ranking or of an evaluation. Its items are layers,
blocks, tasks. Each document has its own in ``values.py`` beside its model: a :class:`Vocabulary`, ``subjects`` that
lists them and ``with_verdicts`` that stores what was found.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from typing import NamedTuple, Protocol, Self

from quanterr.errors import UsageError
from quanterr.metrics import NONFINITE
from quanterr.report.base import Score
from quanterr.report.gate_results import Verdict, Word
from quanterr.util.strict_json import JsonFields, JsonObject
from quanterr.util.text import display

WIDTH = 1.96  # standard errors from a value to an end of its interval of 95 %
INFINITE = {name: value for name, value in NONFINITE.items() if isinf(value)}


class Vocabulary(NamedTuple):
    """What rules may name in a document."""

    document: str  # "report"
    items: Mapping[str, str]  # metric of items → what has it: "layer"
    whole: Collection[str]  # metrics of a subject itself
    example: str  # a rule, for errors
    no_worse: str | None = None  # the rule that a baseline alone asks for; None: it has no baselines
    model: Collection[str] = ()  # metrics that global() finds
    errors: Collection[str] = ()  # metrics of a subject that have a standard error
    done: str = "everything selected was compared"  # what is said of one that passes
    scores: Mapping[str, Score] = {}  # what is said of metrics of a subject


def number(values: JsonFields, nonfinite: Mapping[str, str], name: str) -> float | None:
    """The value of that name; infinite where ``nonfinite`` says so, None where it is undefined."""
    key, _, percentile = name.partition(".")
    value: float | None = values[key][percentile] if percentile else values[key]
    return INFINITE.get(nonfinite.get(key, "")) if value is None else value


class Item(NamedTuple):
    """One of a subject's items. ``trouble`` says why no rule about it can hold."""

    name: str
    kind: str  # what it is: "block"; of a report where it stands: layers, other_changes, lossless, not_compared
    values: JsonFields
    trouble: str | None = None
    perfect: Mapping[str, float] = {}  # what the numbers are of a tensor that is the same on both sides

    def number(self, metric: str) -> float | None:
        """Its value, None where it is undefined. Of a tensor that is the same on both sides the perfect one."""
        if self.identical:
            return self.perfect.get(metric, self.values.get(metric))
        return None if self.kind == "not_compared" else number(self.values, self.values.get("nonfinite", {}), metric)

    @property
    def identical(self) -> bool:
        """Whether it is a tensor that is the same on both sides."""
        return self.kind == "lossless"


@dataclass
class Subject:
    """What rules see of one thing that is judged.

    ``trouble`` says why no rule about the whole model can hold. ``unreliable`` says why its verdict can only be
    inconclusive, ``unquantized`` why it is so under any rule: what was measured is not the quantized model.
    """

    vocabulary: Vocabulary
    items: list[Item]
    whole: Mapping[str, float | None] = field(default_factory=dict)
    name: str | None = None  # of a candidate
    errors: Mapping[str, float | None] = field(default_factory=dict)  # standard errors of the whole's metrics
    trouble: str | None = None
    unreliable: list[str] = field(default_factory=list)
    unquantized: list[str] = field(default_factory=list)
    complete: bool = True
    patterns: Sequence[str] = ()  # what it was restricted to
    too_few: str | None = None  # why there is no interval of its numbers

    def items_with(self, metric: str) -> list[Item]:
        """Those that have a metric, which is one of the vocabulary."""
        return [item for item in self.items if item.kind == self.vocabulary.items[metric]]

    def of_whole(self, metric: str) -> float | None:
        """Its own value; None where it is undefined."""
        return self.whole.get(metric)

    def of_model(self, metric: str) -> float | None:
        """The value of global(); None where it is undefined."""
        raise KeyError(metric)

    def check_usable(self) -> None:
        """Refuse a baseline that cannot be relied on as a whole.

        Raises:
            UsageError: it cannot.
        """

    def check_baseline(self, baseline: Self, metrics: Collection[str]) -> None:
        """Refuse a baseline that says nothing about these metrics of it.

        Raises:
            UsageError: it is of another original, selection or text, or cannot be relied on.
        """
        raise UsageError(f"a {self.vocabulary.document} takes no baseline")


def counterpart(subject: Subject, before: Sequence[Subject]) -> Subject | None:
    """What a subject is compared with: the only one of an older document, or the one of the same name.

    Raises:
        UsageError: there are several, and none has its name.
    """
    if len(before) < 2:
        return next(iter(before), None)
    found = next((old for old in before if old.name == subject.name), None)
    if found is None:
        names = ", ".join(display(old.name or "") for old in before)
        raise UsageError(f"the baseline has no candidate named {display(subject.name or '')}; it has {names}")
    return found


class HasVerdict(Protocol):
    """A candidate, or the verdict on one."""

    verdict: Word
    reasons: list[str]


def overall(candidates: Mapping[str, "HasVerdict | Verdict"]) -> tuple[Word, list[str]]:
    """Verdict and reasons of all candidates together, by their names."""
    found = [one.verdict for one in candidates.values()]
    verdict: Word = "inconclusive" if "inconclusive" in found else "fail" if "fail" in found else "pass"
    if verdict == "pass":
        return verdict, list(next(iter(candidates.values())).reasons)
    return verdict, [
        f"{name}: {reason}" for name, one in candidates.items() if one.verdict == verdict for reason in one.reasons
    ]


def whole_of(judged: Sequence[Subject], candidates: Sequence[object], verdicts: Sequence[Verdict]) -> JsonObject:
    """The fields of a document whose candidates were judged."""
    verdict, reasons = overall(dict(zip((one.name or "" for one in judged), verdicts, strict=True)))
    gated = any(found.gates for found in verdicts)
    return {"candidates": list(candidates), "verdict": verdict, "reasons": reasons, "gated": gated}


def reasons_of_its_own(verdict: str, reasons: Sequence[str], of_gates: Collection[str]) -> list[str]:
    """Why a stored verdict is inconclusive whichever rules were asked; empty where it is not."""
    return [reason for reason in reasons if reason not in of_gates] if verdict == "inconclusive" else []


def change(old: float | None, new: float | None, function: str = "delta") -> float | None:
    """New against old: ``delta`` is new less old, ``rel_delta`` that divided by ``|old|``, ``ratio`` new / old.

    Two equal values did not change, also where both are infinite or zero.
    """
    if old is None or new is None:
        return None
    if old == new:
        return 1.0 if function == "ratio" else 0.0
    if function == "delta":
        return new - old
    if not old or isinf(old):
        return None if function == "ratio" else inf if new > old else -inf
    return new / old if function == "ratio" else (new - old) / abs(old)
