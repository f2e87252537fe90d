"""A candidate that runs beside the original, or beside a reference in its place, and its measurements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from quanterr.documents.evaluation.model import (
    BlockError,
    Embeddings,
    Outputs,
    PositionScores,
    RouterAgreement,
    SwapScore,
    WeightError,
)
from quanterr.documents.evaluation.model import Scores as ReportedScores
from quanterr.errors import CheckpointError
from quanterr.evaluation.measures.hidden_states import HiddenError, are_finite, find_hidden_states
from quanterr.evaluation.measures.routers import Routers, RouterWatch, Routing
from quanterr.evaluation.measures.scores import Prediction
from quanterr.evaluation.models.weights import Candidate
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.model_run import MeasuredRun
from quanterr.evaluation.running.stream import Stream
from quanterr.evaluation.running.workload import Measures, Workload
from quanterr.util.text import display

LOGITS_NAME = "the logits"  # what not_finite names if the logits are the first output that is not finite


@dataclass
class Outcome:
    """All measurements of a candidate."""

    scores: ReportedScores | None = None
    texts: list[ReportedScores] = field(default_factory=list)  # scores of each text, if there are several
    positions: list[PositionScores] = field(default_factory=list)
    worst: list[Prediction] = field(default_factory=list)
    embeddings: Embeddings | None = None
    outputs: Outputs | None = None
    not_finite: str | None = None
    blocks: list[BlockError] = field(default_factory=list)
    weights: list[WeightError] = field(default_factory=list)
    swaps: list[SwapScore] = field(default_factory=list)
    routers: list[RouterAgreement] = field(default_factory=list)


class Measured(NamedTuple):
    """The measurements of a candidate, as processes exchange them."""

    measures: Measures
    blocks: dict[str, HiddenError]
    not_finite: set[str]  # names of units
    routers: Routers
    input_noise: dict[str, float]


class Step(NamedTuple):
    """What the original computes in a unit for a micro-batch."""

    hidden: Tensor | None  # hidden states after the unit; None if there are none, or if a reference lacks them
    routed: Mapping[str, Routing]  # by router
    result: Callable[[], Any]  # returns the result of the forward if it has ended, otherwise None


class CandidateRun(MeasuredRun):
    """The run of a candidate, and its measurements."""

    def __init__(
        self,
        candidate: Candidate,
        stream: Stream,
        workload: Workload,
        batches: Mapping[int, Batch],
        measures_rounding: bool = False,
    ) -> None:
        """Start without measurements; with ``measures_rounding``, the effect of rounded inputs is measured as well."""
        super().__init__(stream, workload, batches, candidate.rounding, measures_rounding)
        self.candidate = candidate
        self._watch, self._routers = RouterWatch(stream.model), Routers()
        self._blocks: dict[str, HiddenError] = {}
        self._not_finite: set[str] = set()

    def undo_folding(self, loaded: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the ``loaded`` weights of the unit in the original's scales."""
        names = [slot.name for slot in self.unit.slots]
        folded = any(key in self.candidate.unfolded for name in names for key in self.stream.names.sources(name))
        return self.stream.names.tensors(names, self.candidate.unfold) if folded else loaded

    def follow(self, batch: int, step: Step) -> None:
        """Run the loaded unit for a micro-batch that the original has run, and measure the output.

        Raises:
            CheckpointError: the micro-batch waits for another unit.
        """
        if not self.stream.waits(batch, self.unit):
            raise CheckpointError(f"the control flow of the models diverges at {display(self.unit.name)}")
        result = self.run(batch, lambda output: self._compare(batch, output, step))
        base = None if result is None else step.result()
        if base is not None and not self.measure(batch, base, result):
            self._not_finite.add(LOGITS_NAME)

    def _compare(self, batch: int, output: object, step: Step) -> None:
        """Compare the output of the loaded unit with the original's, unless it is the model's own result."""
        number = self._batches[batch].number
        self._routers.add(number, step.routed, self._watch.take())
        hidden = find_hidden_states(output)
        if hidden is None:
            return
        if step.hidden is None:
            finite = are_finite(hidden)
        elif step.result() is None:
            error = self._blocks.setdefault(self.unit.name, HiddenError())
            finite = error.add((self.loads, number), step.hidden, hidden)
        else:
            return
        if not finite:
            self._not_finite.add(self.unit.name)

    def follow_piece(self, batch: int, base: Any, first: int, last: int) -> None:
        """Compute the logits of some positions, counted from the end, and measure them against the original's."""
        if not self.measure_piece(batch, base, self.compute(first, last), first):
            self._not_finite.add(LOGITS_NAME)

    def get_measurements(self) -> Measured:
        """Return the measurements, for :meth:`merge` in another process."""
        return Measured(self.measures, self._blocks, self._not_finite, self._routers, self.candidate.rounding.noise)

    def merge(self, other: Measured) -> None:
        """Add measurements on other micro-batches."""
        self.measures.merge(other.measures)
        for name, error in other.blocks.items():
            self._blocks.setdefault(name, HiddenError()).merge(error)
        self._not_finite |= other.not_finite
        self._routers.merge(other.routers)
        noise = self.candidate.rounding.noise
        for name, more in other.input_noise.items():
            noise[name] = noise.get(name, 0.0) + more

    def outcome(self, spans: Sequence[range]) -> Outcome:
        """Return the measurements, except the errors of weights; ``spans`` are the chunk numbers of each text."""
        blocks = [BlockError(name, **error.row()) for name, error in self._blocks.items()]
        not_finite = min(self._not_finite, key=[*self.stream.units, LOGITS_NAME].index, default=None)
        outcome = Outcome(not_finite=not_finite, blocks=blocks, routers=self._routers.rows())
        measures = self.measures
        if not_finite is None and measures.scores.columns:
            try:
                outcome.scores = ReportedScores(**measures.scores.result())
                outcome.positions, outcome.worst = measures.scores.by_position(), measures.scores.worst()
                if len(spans) > 1:
                    outcome.texts = [ReportedScores(**measures.scores.among(span).result()) for span in spans]
            except OverflowError:
                outcome.not_finite = "the perplexity"
        if not_finite is None and measures.embedded.chunks:
            outcome.embeddings = measures.embedded.result()
        if not_finite is None and measures.outputs.calls:
            outcome.outputs = measures.outputs.result()
        return outcome
