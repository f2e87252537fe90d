"""Subjects of an evaluation for rules: each candidate with its scores, texts, tasks, blocks and weights.

A candidate is inconclusive under any rule if it equals the original, or if its config.json or tokenizer differs from
the one used. There is no confidence interval from fewer than eight chunks: tokens of one chunk are not independent.
Diffs compare the output errors of weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Self

from quanterr.documents.diff.base import Changes
from quanterr.documents.diff.candidates.model import ItemChange
from quanterr.documents.evaluation.model import (
    METRICS,
    OF_ROUTERS,
    OF_TASKS,
    OF_TEXTS,
    SCORES,
    Evaluated,
    Evaluation,
    find_difference,
)
from quanterr.documents.gate_results import Reason, list_damage, list_waived
from quanterr.documents.subjects import Item, Subject, Vocabulary, list_own_reasons
from quanterr.errors import UsageError
from quanterr.metrics import PREDICTED

MIN_CHUNKS = 8  # minimum number of chunks for a confidence interval
UNCHANGED_ERROR = 0.01  # relative change of an output error up to which it counts as unchanged
ANOTHER_MODEL = (
    "identical",
    "config_mismatch",
)  # findings: the evaluated model is not the quantized model that will run
MADE_UP = "its calls were made up: record real ones, or let gates judge these with --allow-gaussian"
OF_BLOCKS = ("relative_error", "cosine", "worst_token_error")
OF_SWAPS = ("swap_kld",)
OF_WEIGHTS = ("output_error", "share_of_block", *PREDICTED, "input_error", "share_of_inputs")

OF_CANDIDATES = [name for name in METRICS if name not in OF_TASKS]

# Kind of item → the fields of a candidate and of the item's name, and the item's metrics.
ITEMS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "task": ("tasks", "name", OF_TASKS),
    "text": ("texts", "name", OF_TEXTS),
    "router": ("routers", "name", OF_ROUTERS),
    "swap": ("swaps", "name", OF_SWAPS),
    "block": ("blocks", "name", OF_BLOCKS),
    "weight": ("weights", "layer_name", OF_WEIGHTS),
}

VOCABULARY = Vocabulary(
    "evaluation",
    {metric: item_kind for item_kind, (_, _, metrics) in ITEMS.items() for metric in metrics},
    OF_CANDIDATES,
    "kld_mean <= 0.01",
    "ratio(kld_mean) <= 1.1",
    errors=[name for name in OF_CANDIDATES if f"{name}_se" in METRICS],
    done="everything was evaluated",
    scores=SCORES,
)


@dataclass(kw_only=True)
class EvaluatedValues(Subject):
    """The subject of one candidate."""

    evaluation: Evaluation

    def check_baseline(
        self, baseline: Self, metrics: Collection[str], any_original: bool = False, among: Sequence[str] = ()
    ) -> None:
        """Raise UsageError unless the baseline has the same text and settings."""
        if why := find_difference(baseline.evaluation, self.evaluation):
            raise UsageError(f"--baseline: {why}")


def list_subjects(evaluation: Evaluation) -> list[Subject]:
    """Return the candidates."""
    return [_make_subject(evaluation, candidate) for candidate in evaluation.candidates]


def _make_subject(evaluation: Evaluation, candidate: Evaluated) -> Subject:
    chunks = candidate.scores.chunks if candidate.scores else None
    few = chunks is not None and chunks < MIN_CHUNKS
    too_few = f"needs at least {MIN_CHUNKS} chunks of text, found {chunks}: give more text" if few else None
    items = [
        Item(getattr(row, name), item_kind, row)
        for item_kind, (field, name, _) in ITEMS.items()
        for row in getattr(candidate, field)
    ]
    return EvaluatedValues(
        VOCABULARY,
        items,
        {name: candidate.value(name) for name in METRICS} | {"bytes": candidate.bytes},
        candidate.name,
        {name: candidate.error(name) for name in VOCABULARY.errors},
        unreliable=[
            *list_own_reasons(candidate),
            *([Reason(MADE_UP, "result")] if evaluation.made_up and not evaluation.made_up_allowed else []),
        ],
        unquantized=[
            Reason(finding.message, "finding") for finding in candidate.findings if finding.code in ANOTHER_MODEL
        ],
        too_few=too_few,
        damage=list_damage(candidate),
        waived=list_waived(candidate),
        evaluation=evaluation,
    )


@dataclass(slots=True)
class WeightChange(ItemChange):
    """A weight whose output error changed by more than 1 %."""

    old_output_error: float
    new_output_error: float
    ratio: float | None  # null: the old error was 0


def _compare_weights(was: Item, now: Item) -> tuple[float, ItemChange] | None:
    x, y = was.values.output_error, now.values.output_error
    if x is None or y is None or x == y:
        return None
    by = log(y / x) if x and y else inf if y else -inf
    return (by, WeightChange(now.name, x, y, y / x if x else None)) if abs(by) > log(1 + UNCHANGED_ERROR) else None


CHANGES = Changes("weight", _compare_weights, find_difference)
