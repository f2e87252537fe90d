"""The run of all sides, unit by unit: weights are read once, hidden states and logits compared as soon as computed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quanterr.documents.evaluation.model import Floor
from quanterr.evaluation.denoisers.calls import CallError, OutputMeasures
from quanterr.evaluation.files.references import KeptHead, Reference
from quanterr.evaluation.measures.embeddings import Embedded
from quanterr.evaluation.measures.hidden_states import Errors, HiddenError
from quanterr.evaluation.measures.outputs_of_weights import Norms, Product
from quanterr.evaluation.measures.routers import Agreement, Routers
from quanterr.evaluation.measures.scores import Scores
from quanterr.evaluation.measures.swaps import Swap, Swaps
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.models.weights import Candidate, OriginalWeights
from quanterr.evaluation.preparation import Prepared
from quanterr.evaluation.running.batches import Batch, batches_of
from quanterr.evaluation.running.candidate import CandidateRun, Measured, Outcome, Step
from quanterr.evaluation.running.draft import Draft, DraftRun
from quanterr.evaluation.running.floor import FloorRun
from quanterr.evaluation.running.logits import head_of
from quanterr.evaluation.running.logits import spans_of as spans_of_logits
from quanterr.evaluation.running.model_run import ModelRun, take_turns
from quanterr.evaluation.running.original import OriginalRun
from quanterr.evaluation.running.stream import Stream, open_stream
from quanterr.evaluation.running.workload import CAUSAL, Measures
from quanterr.options import EvaluateOptions
from quanterr.util.rank_group import RankGroup


class Measurements(NamedTuple):
    """All measurements, as processes exchange them."""

    products: dict[str, Product]
    unit_of: dict[str, str]
    sides: list[Measured]
    floor: tuple[Measures, str] | None  # its measures, and the reason if there is none
    swaps: list[Swap] | None


# The classes in these measurements; data of other classes are not accepted from another process.
EXCHANGED: list[Any] = [Measurements, Product, Norms, Measured, Measures, Scores, Embedded, OutputMeasures, CallError]
EXCHANGED += [HiddenError, Errors, Routers, Agreement, Swap]


class Run(ABC):
    """The run of candidates, unit by unit, beside the original or a reference in its place."""

    def __init__(
        self,
        prepared: Prepared,
        batches: Mapping[int, Batch],
        chosen: EvaluateOptions,
        stream: Stream,
        candidates: Sequence[CandidateRun],
        others: Sequence[DraftRun | FloorRun] = (),
    ) -> None:
        """Run candidates and others in the order of the units of ``stream``."""
        self._prepared, self._batches, self._chosen, self._stream = prepared, batches, chosen, stream
        self._candidates, self._followers = candidates, [*candidates, *others]
        self._participants: list[ModelRun | FloorRun] = [*self._followers]
        self.model = type(stream.model).__name__
        is_causal = prepared.architecture.workload.kind == CAUSAL.kind
        self._head = head_of(stream.model, stream.units) if is_causal else None

    @abstractmethod
    def _lead(self, batch: int) -> Step:
        """Return what the original computes in the loaded unit for a micro-batch."""

    @abstractmethod
    def _compute(self, batch: int, first: int, last: int) -> Any:
        """Return the original's result for some positions of a micro-batch, counted from the end."""

    def run(self) -> None:
        """Run every unit for every micro-batch of every side.

        Raises:
            Interrupted: ``stop`` was set.
        """
        stop, on_progress = self._chosen.stop, self._chosen.on_progress
        for batch in take_turns(self._stream, self._load, self._free, stop, on_progress):
            if not self._run_in_pieces(batch):
                step = self._lead(batch)
                for each in self._followers:
                    each.follow(batch, step)

    def close(self) -> None:
        """End all forwards."""
        for each in self._participants:
            each.close()

    def outcomes(self) -> list[Outcome]:
        """Return the measurements of each candidate."""
        return [side.outcome(self._prepared.spans) for side in self._candidates]

    def _load(self, unit: Unit) -> None:
        """Load a unit on all sides."""
        self._load_candidates(unit, {})

    def _load_candidates(self, unit: Unit, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """Load a unit of the candidates and return its weights in the original's scales; ``tensors`` are its own."""
        self._unit = unit
        read: dict[int, dict[str, Tensor]] = {}  # keys identify a candidate's weights, which roundings share
        compared = []
        for side in self._candidates:
            if (key := id(side.candidate.pairs)) not in read:
                read[key] = _share_equal(side.stream.tensors(unit), tensors)
            side.load(unit, read[key])
            compared.append(side.undo_folding(read[key]))
        return compared

    def _free(self) -> None:
        """Free the unit on all sides."""
        for side in self._candidates:
            side.free()

    def _run_in_pieces(self, batch: int) -> bool:
        """Run the loaded head for some positions at a time; return False if all positions must run at once."""
        if self._unit is not self._head:
            return False
        micro_batch = self._batches[batch]
        spans = spans_of_logits(len(micro_batch.raw), CAUSAL.count_rows(micro_batch), self._prepared.vocabulary)
        if len(spans) < 2 or not all(each.begin(batch) for each in self._participants):
            return False
        for first, last in spans:
            base = self._compute(batch, first, last)
            for follower in self._followers:
                follower.follow_piece(batch, base, first, last)
            del base
        for each in self._participants:
            each.end(batch)
        return True


class RunBesideOriginal(Run):
    """The run of the original and its candidates on the same tokens."""

    def __init__(
        self,
        prepared: Prepared,
        weights: OriginalWeights,
        candidates: Sequence[Candidate],
        chosen: EvaluateOptions,
        group: RankGroup | None,
        with_floor: bool = False,
        drafts: Sequence[Draft] = (),
    ) -> None:
        """Build a model for each side, and read only the weights that belong to no unit.

        With ``with_floor``, the original runs in its own dtype as well. Each process of ``group`` takes its share of
        the micro-batches.

        Raises:
            CheckpointError: the model has a weight that is not stored, or has another shape.
            UsageError: the inputs of a head are needed, but the model has no head of its own, or there are several
                processes.
        """
        architecture, all_batches = prepared.architecture, batches_of(prepared.chunks, chosen.batch)
        batches = dict(enumerate(all_batches if group is None else all_batches[group.rank :: group.world]))
        stream = open_stream(architecture, weights, weights.weights, weights.get, batches)
        runs = _start(architecture, candidates, batches, stream, measures_rounding=True)
        self._drafts = [DraftRun(draft, batches) for draft in drafts]
        self._floor = FloorRun(architecture, weights, batches) if with_floor else None
        swaps = kept = None
        if chosen.swap_blocks or chosen.swap:
            swaps = Swaps(stream, architecture.workload, batches, len(runs), chosen.swap_blocks, chosen.swap)
        if chosen.save_reference is not None:
            kept = KeptHead(architecture, stream, group)
        self.original = OriginalRun(stream, batches, chosen.with_moments, swaps, kept)
        others: list[DraftRun | FloorRun] = [*self._drafts, *([] if self._floor is None else [self._floor])]
        super().__init__(prepared, batches, chosen, stream, runs, others)
        self._participants.insert(0, self.original)

    def run(self) -> None:
        """Run every unit for every micro-batch of every side; drafts come first, up to their heads.

        Raises:
            Interrupted: ``stop`` was set.
        """
        for draft in self._drafts:
            draft.run_to_head(self._chosen.stop, self._chosen.on_progress)
        super().run()

    def _lead(self, batch: int) -> Step:
        return self.original.lead(batch)

    def _compute(self, batch: int, first: int, last: int) -> Any:
        return self.original.compute(first, last)

    def _load(self, unit: Unit) -> None:
        self.original.load(unit)
        self.original.watch(self._load_candidates(unit, self.original.tensors))
        if self._floor is not None:
            self._floor.load(unit, self.original.tensors)

    def _free(self) -> None:
        """Free the unit on all sides; the floor comes last, as it runs the unit before it frees it."""
        self.original.free()
        super()._free()
        if self._floor is not None:
            self._floor.free()

    def outcomes(self) -> list[Outcome]:
        """Return the measurements of each candidate."""
        outcomes, swaps = super().outcomes(), self.original.swaps
        for n, (outcome, side) in enumerate(zip(outcomes, self._candidates, strict=True)):
            outcome.weights = self.original.errors.rows(n, side.candidate.rounding.noise)
            outcome.swaps = [] if swaps is None else swaps.scores(n)
        return outcomes

    def draft_outcomes(self) -> list[Outcome]:
        """Return the measurements of each draft: its scores."""
        return [draft.outcome(self._prepared.spans) for draft in self._drafts]

    def floor(self) -> Floor | None:
        """Return the error of the original in its stored dtype; None if it did not run."""
        return None if self._floor is None else self._floor.result()

    def measurements(self) -> Measurements:
        """Return all measurements, for :meth:`merge` in another process."""
        errors, swaps = self.original.errors, self.original.swaps
        sides = [side.get_measurements() for side in (*self._candidates, *self._drafts)]
        floor = None if self._floor is None else (self._floor.measures, self._floor.reason)
        return Measurements(errors.products, errors.unit_of, sides, floor, None if swaps is None else swaps.swaps)

    def merge(self, other: Measurements) -> None:
        """Add another process's measurements on its share of the micro-batches."""
        self.original.errors.unit_of |= other.unit_of
        self.original.errors.merge(other.products)
        for side, measured in zip((*self._candidates, *self._drafts), other.sides, strict=True):
            side.merge(measured)
        if self._floor is not None and other.floor is not None:  # on each rank, both exist or neither
            self._floor.merge(*other.floor)
        if self.original.swaps is not None and other.swaps is not None:
            self.original.swaps.merge(other.swaps)


class RunBesideReference(Run):
    """The run of candidates on the tokens of a reference, whose logits are computed from inputs of its head."""

    def __init__(
        self, prepared: Prepared, candidates: Sequence[Candidate], chosen: EvaluateOptions, reference: Reference
    ) -> None:
        """Build a model for each candidate, and read only the weights that belong to no unit.

        Raises:
            CheckpointError: a candidate lacks a weight of the model, or has it in another shape.
        """
        architecture, batches = prepared.architecture, dict(enumerate(batches_of(prepared.chunks, chosen.batch)))
        assert isinstance(architecture, Architecture)  # noqa: S101 - only such models have references
        runs = _start(architecture, candidates, batches)
        super().__init__(prepared, batches, chosen, runs[0].stream, runs)
        self._reference, self._head_of_original = reference, reference.head(architecture)

    def _lead(self, batch: int) -> Step:
        """Return the step of a micro-batch, whose result is computed when it is needed."""
        return Step(None, {}, cache(lambda: self._compute(batch, -self._reference.read_hidden(batch).shape[1], 0)))

    def _compute(self, batch: int, first: int, last: int) -> Any:
        hidden = self._reference.read_hidden(batch)
        rows = slice(hidden.shape[1] + first, hidden.shape[1] + last)
        return self._head_of_original(hidden[:, rows], self._stream.get_inputs(batch))


def _start(
    architecture: Architecture | Denoiser,
    candidates: Sequence[Candidate],
    batches: Mapping[int, Batch],
    like: Stream | None = None,
    measures_rounding: bool = False,
) -> list[CandidateRun]:
    """Start the candidates; they share the arguments of the stream ``like``, if given."""
    runs: list[CandidateRun] = []
    for candidate in candidates:
        stream = open_stream(architecture, candidate.originals, candidate.names, candidate.get, batches, like)
        like = like or stream
        runs.append(CandidateRun(candidate, stream, architecture.workload, batches, measures_rounding))
    return runs


def _share_equal(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a candidate's weights; weights that equal the original's, as embeddings often do, share its memory."""
    return {
        name: tensors[name] if name in tensors and torch.equal(tensor, tensors[name]) else tensor
        for name, tensor in weights.items()
    }
