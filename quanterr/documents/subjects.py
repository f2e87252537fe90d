"""Subjects that rules judge, their items and their metrics, for all kinds of documents.

A subject receives a verdict: a report, a plan, a candidate of a ranking or evaluation. Its items are layers, blocks or
tasks. For each kind of document, ``values.py`` next to its model has a :class:`Vocabulary` with the metrics, and
``list_subjects``, which returns the subjects of a document.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from operator import attrgetter
from typing import Any, NamedTuple, Self

from msgspec import Struct

from quanterr.documents.gate_results import HasGates, Reason, StoredReasons, Word, list_reasons, store_reasons
from quanterr.documents.loading import Loading
from quanterr.errors import UsageError
from quanterr.metrics import NONFINITE
from quanterr.metrics.scores import Score
from quanterr.util.text import display, itemize

HALF_WIDTH = 1.96  # half the width of a 95 % confidence interval, in standard errors
MAX_NAMED = 5  # candidates that a message names
INFINITE_VALUES = {name: value for name, value in NONFINITE.items() if isinf(value)}


class Vocabulary(NamedTuple):
    """The metrics that rules may name in a kind of document."""

    document: str  # name of the document, such as "report"
    items: Mapping[str, str]  # metric of items → the kind of item that has it, such as "layer"
    whole: Collection[str]  # metrics of the subject itself
    example: str  # a rule to show in error messages
    no_worse: str | None = None  # the rule that a baseline implies; None: no baseline is possible
    model: Collection[str] = ()  # metrics that global() accepts
    errors: Collection[str] = ()  # metrics of the subject that have a standard error
    done: str = "everything selected was compared"  # message of a subject that passes
    scores: Mapping[str, Score] = {}  # scores of the subject's metrics
    loads: bool = False  # whether the document may say which programs load a checkpoint


def read_number(values: object, nonfinite: Mapping[str, str], name: str) -> float | None:
    """Return a value by name, such as "snr_db"; infinite if ``nonfinite`` names it so, None if undefined."""
    value: float | None = attrgetter(name)(values)
    return INFINITE_VALUES.get(nonfinite.get(name.partition(".")[0], "")) if value is None else value


class Item(Struct, frozen=True, gc=False):
    """One item of a subject. ``values`` has its metrics; ``trouble`` explains why no rule about it can hold."""

    name: str
    kind: str  # such as "block"; in a report its list: layers, other_changes, lossless, not_compared
    values: Any
    trouble: str | None = None
    perfect: Mapping[str, float] = {}  # values of metrics for a tensor that is identical on both sides

    def get_number(self, metric: str) -> float | None:
        """Return a metric's value, None if undefined; the perfect value for a tensor identical on both sides."""
        value: float | None = getattr(self.values, metric, None)
        if self.kind == "lossless":
            return self.perfect.get(metric, value)
        if value is None and self.values is not None:
            return read_number(self.values, getattr(self.values, "nonfinite", {}), metric)
        return value

    @property
    def identical(self) -> bool:
        """True for a tensor that is identical on both sides."""
        return self.kind == "lossless"


@dataclass
class Subject:
    """A report, or one candidate of a document with several, as rules judge it: its items and its metrics.

    ``trouble`` explains why no rule about the whole model can hold, ``unreliable`` why the verdict can only be
    inconclusive, ``unquantized`` why it is inconclusive under any rules: the measured model is not the quantized one.
    """

    vocabulary: Vocabulary
    items: list[Item]
    whole: Mapping[str, float | None]  # the subject's own metrics; None: undefined
    name: str | None = None  # name of the candidate
    errors: Mapping[str, float | None] = field(default_factory=dict)  # standard errors of the metrics in ``whole``
    trouble: str | None = None
    unreliable: list[Reason] = field(default_factory=list)
    unquantized: list[Reason] = field(default_factory=list)
    complete: bool = True
    patterns: Sequence[str] = ()  # the selection of layers
    too_few: str | None = None  # why the numbers have no confidence interval
    damage: list[str] = field(default_factory=list)  # errors that were found, which nothing excuses
    loading: Sequence[Loading] = ()
    waived: list[str] = field(default_factory=list)  # findings that a user waived

    def list_items(self, metric: str) -> list[Item]:
        """Return the items that have a metric of the vocabulary."""
        return [item for item in self.items if item.kind == self.vocabulary.items[metric]]

    def get_model_metric(self, metric: str) -> float | None:
        """Return the value of global(metric), None if undefined."""
        raise KeyError(metric)

    def find_refusal(self, runtime: str) -> str | None:
        """Return why a runtime may not load the checkpoint; None if it certainly loads it."""
        matching = [runtime_result for runtime_result in self.loading if runtime_result.name == runtime]
        return matching[0].refusal if matching else f"the result does not say; give --for {runtime} when it is made"

    def list_metrics(self) -> dict[str, float]:
        """Return the metrics of the subject itself that have a value; global(snr_db) is called ``global/snr_db``."""
        both = {f"global/{name}": self.get_model_metric(name) for name in self.vocabulary.model} | {
            name.replace("(", "/").rstrip(")"): self.whole[name] for name in self.vocabulary.whole
        }
        return {name: float(value) for name, value in both.items() if value is not None}

    def find_cause(self, metric: str, item: str | None) -> str | None:
        """Return the finding that explains a bad value of an item, or of the whole; None if there is none."""
        return None

    def check_usable(self) -> None:
        """Raise UsageError if the subject as a whole cannot serve as a baseline."""

    def check_baseline(
        self, baseline: Self, metrics: Collection[str], any_original: bool = False, among: Sequence[str] = ()
    ) -> str | None:
        """Check that a baseline is comparable in these metrics; return how its original differs, if it may.

        A baseline of all layers also serves a report of those that the patterns ``among`` select, if only these are
        judged.

        Raises:
            UsageError: the baseline is unreliable, or has another original, selection or text.
        """
        raise UsageError(f"a {self.vocabulary.document} takes no baseline")


def find_counterpart(subject: Subject, before: Sequence[Subject]) -> Subject | None:
    """Return the older subject to compare with: the only one, or the one with the same name; None if there is none.

    Raises:
        UsageError: there are several, and none has the same name.
    """
    if len(before) < 2:
        return next(iter(before), None)
    counterpart = next((old for old in before if old.name == subject.name), None)
    if counterpart is None:
        names = ", ".join(display(old.name or "") for old in before)
        raise UsageError(f"the baseline has no candidate named {display(subject.name or '')}; it has {names}")
    return counterpart


def combine_verdicts(candidates: Mapping[str, HasGates]) -> tuple[Word, StoredReasons]:
    """Return the joint verdict of candidates, given by name, and its reasons, each once."""
    verdicts = [candidate.verdict for candidate in candidates.values()]
    verdict: Word = "inconclusive" if "inconclusive" in verdicts else "fail" if "fail" in verdicts else "pass"
    if verdict == "pass":
        return verdict, store_reasons(list_reasons(next(iter(candidates.values()))))
    names: dict[Reason, list[str]] = {}
    for name, candidate in candidates.items():
        for reason in list_reasons(candidate) if candidate.verdict == verdict else ():
            names.setdefault(reason, []).append(name)
    total = len(candidates)
    named = [
        Reason(f"{name_candidates(sharing, total)}: {reason.text}", reason.by) for reason, sharing in names.items()
    ]
    return verdict, store_reasons(named)


def name_candidates(names: Sequence[str], candidates: int) -> str:
    """Return the names of candidates that share something, or "all 3 candidates"."""
    if len(names) < max(candidates, 2):
        return itemize(names, MAX_NAMED)
    return "both candidates" if candidates == 2 else f"all {candidates:,} candidates"


def list_own_reasons(judged: HasGates) -> list[Reason]:
    """Return the reasons of an inconclusive stored verdict that hold under any rules; empty for other verdicts."""
    known = list_reasons(judged) if judged.verdict == "inconclusive" else []
    return [reason for reason in known if reason.by in ("result", "finding")]


def compute_change(old: float | None, new: float | None, function: str = "delta") -> float | None:
    """Return the change from old to new: "delta" new - old, "rel_delta" (new - old) / ``|old|``, "ratio" new / old.

    Equal values give no change, even if both are infinite or zero. None if undefined.
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
