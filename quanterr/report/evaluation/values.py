"""What rules see of an evaluation: of each candidate its scores, and its texts, tasks, blocks and weights.

A candidate that is the original, or whose config.json or tokenizer differs from those that it was run with, is
inconclusive under any rule. Of fewer than eight chunks no interval is formed: tokens of one chunk are no independent
samples.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Self

from quanterr.errors import UsageError
from quanterr.report.evaluation.model import METRICS, OF_TASKS, OF_TEXTS, SCORES, Evaluated, Evaluation, difference
from quanterr.report.gate_results import Verdict
from quanterr.report.subjects import Item, Subject, Vocabulary, reasons_of_its_own, whole_of

LEAST_CHUNKS = 8
ANOTHER_MODEL = ("identical", "config_mismatch")  # findings: not the quantized model that will run was evaluated
OF_BLOCKS = ("relative_error", "cosine", "worst_token_error")
OF_WEIGHTS = ("output_error", "share_of_block", "predicted_kld")

OF_CANDIDATES = [name for name in METRICS if name not in OF_TASKS]

VOCABULARY = Vocabulary(
    "evaluation",
    {
        **dict.fromkeys(OF_BLOCKS, "block"),
        **dict.fromkeys(OF_WEIGHTS, "weight"),
        **dict.fromkeys(OF_TASKS, "task"),
        **dict.fromkeys(OF_TEXTS, "text"),
    },
    OF_CANDIDATES,
    "kld_mean <= 0.01",
    "ratio(kld_mean) <= 1.1",
    errors=[name for name in OF_CANDIDATES if f"{name}_se" in METRICS],
    done="everything was evaluated",
    scores=SCORES,
)


@dataclass(kw_only=True)
class EvaluatedValues(Subject):
    """All that rules see of one candidate."""

    evaluation: Evaluation

    def check_baseline(self, baseline: Self, metrics: Collection[str]) -> None:
        """Refuse an evaluation of another text, or computed otherwise.

        Raises:
            UsageError: it is such.
        """
        if why := difference(baseline.evaluation, self.evaluation):
            raise UsageError(f"--baseline: {why}")


def subjects(evaluation: Evaluation, metrics: Collection[str]) -> list[Subject]:
    """Its candidates."""
    return [_subject(evaluation, candidate) for candidate in evaluation.candidates]


def with_verdicts(evaluation: Evaluation, judged: Sequence[Subject], verdicts: Sequence[Verdict]) -> Evaluation:
    """The same, judged."""
    own = {field.name for field in fields(Evaluated)}
    candidates = [
        Evaluated(**{name: getattr(candidate, name) for name in own} | found._asdict())
        for candidate, found in zip(evaluation.candidates, verdicts, strict=True)
    ]
    return evaluation.model_copy(update=whole_of(judged, candidates, verdicts))


def _subject(evaluation: Evaluation, candidate: Evaluated) -> Subject:
    chunks = candidate.scores.chunks if candidate.scores else None
    few = chunks is not None and chunks < LEAST_CHUNKS
    too_few = f"needs {LEAST_CHUNKS} chunks of text at least, there are {chunks}: give more text" if few else None
    of_gates = [gate.message for gate in candidate.gates]
    return EvaluatedValues(
        VOCABULARY,
        _items(candidate),
        {name: candidate.value(name) for name in METRICS} | {"bytes": candidate.bytes},
        candidate.name,
        {name: candidate.error(name) for name in VOCABULARY.errors},
        unreliable=reasons_of_its_own(candidate.verdict, candidate.reasons, of_gates),
        unquantized=[found.message for found in candidate.findings if found.code in ANOTHER_MODEL],
        too_few=too_few,
        evaluation=evaluation,
    )


def _items(candidate: Evaluated) -> list[Item]:
    of_kinds = (
        ("task", [(task.name, task) for task in candidate.tasks], OF_TASKS),
        ("text", [(text.name, text) for text in candidate.texts], OF_TEXTS),
        ("block", [(block.name, block) for block in candidate.blocks], OF_BLOCKS),
        ("weight", [(weight.layer_name, weight) for weight in candidate.weights], OF_WEIGHTS),
    )
    return [
        Item(name, kind, {metric: getattr(row, metric) for metric in metrics})
        for kind, rows, metrics in of_kinds
        for name, row in rows
    ]
