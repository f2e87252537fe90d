"""The run of all sides, unit by unit: each weight is read once, hidden states and logits are compared as they arise."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from quanterr.documents.evaluation.model import (
    BlockError,
    Embeddings,
    Floor,
    Outputs,
    PositionScores,
    RouterAgreement,
    SwapScore,
    WeightError,
)
from quanterr.documents.evaluation.model import Scores as ReportedScores
from quanterr.errors import CheckpointError, Interrupted, UsageError
from quanterr.evaluation.by_products.references import SAVE, Head, Reference
from quanterr.evaluation.denoisers.calls import Calls
from quanterr.evaluation.measures.floor import FloorRun, FoundFloor
from quanterr.evaluation.measures.routers import FoundRouters, Routers, RouterWatch
from quanterr.evaluation.measures.scores import Prediction
from quanterr.evaluation.measures.states import HiddenError, OutputErrors, PlainErrors, Product, are_finite, hidden_of
from quanterr.evaluation.measures.swaps import FoundSwap, Swaps
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.names import Names
from quanterr.evaluation.models.sides import Candidate, Sides
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.running.batches import Batch, batches_of
from quanterr.evaluation.running.rounding import RoundingMode
from quanterr.evaluation.running.stepping import Stream
from quanterr.evaluation.running.tail import Pieces, head_of
from quanterr.evaluation.running.tail import spans_of as spans_of_logits
from quanterr.evaluation.running.workload import CALLS, CAUSAL, FoundMeasures, Measures
from quanterr.evaluation.texts.tokens import Chunks, spans_of
from quanterr.util.platform import give_back_memory
from quanterr.util.text import display, listed

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

MAX_NAMED = 3
DRAFT = "--draft"
LOGITS = "the logits"  # may be the first output that is not finite
STOPPED = "no scores: interrupted before the last block"


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


class RunSettings(NamedTuple):
    """Settings of a run: chunks per micro-batch, progress callback, stop event and by-products to keep.

    Process ``rank`` of ``world`` takes its share of the micro-batches. ``with_hidden`` keeps the inputs of the head,
    from which a reference is made. For ``swap_blocks`` and ``swap``, see swaps.py.
    """

    batch: int
    on_progress: Callable[[int, int, int, int], None] | None
    stop: threading.Event
    with_moments: bool
    rank: int = 0
    world: int = 1
    with_hidden: bool = False
    swap_blocks: bool = False
    swap: Sequence[str] = ()  # patterns of weights


class FoundSide(TypedDict):
    """The measurements of a candidate in the form in which processes exchange them."""

    measures: FoundMeasures
    blocks: dict[str, PlainErrors]
    not_finite: list[str]
    routers: FoundRouters
    input_noise: dict[str, float]


class Found(TypedDict):
    """All measurements in the form in which processes exchange them: tensors, numbers, texts."""

    products: dict[str, dict[str, Any]]  # fields of Product
    unit_of: dict[str, str]
    sides: list[FoundSide]
    floor: FoundFloor | None
    swaps: list[FoundSwap] | None


@dataclass
class Running:
    """A candidate that runs, with its measurements so far."""

    candidate: Candidate
    stream: Stream
    measures: Measures = field(default_factory=Measures)
    blocks: dict[str, HiddenError] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)
    routers: Routers = field(default_factory=Routers)

    def __post_init__(self) -> None:
        self.watch = RouterWatch(self.stream.model)

    def found(self) -> FoundSide:
        """Return the measurements in the form that :meth:`add` takes."""
        return {
            "measures": self.measures.found(),
            "blocks": {name: error.plain() for name, error in self.blocks.items()},
            "not_finite": list(self.not_finite),
            "routers": self.routers.found(),
            "input_noise": dict(self.candidate.rounding.noise),
        }

    def add(self, found: FoundSide) -> None:
        """Add measurements on other micro-batches."""
        self.measures.add(found["measures"])
        for name, parts in found["blocks"].items():
            self.blocks.setdefault(name, HiddenError()).add_plain(parts)
        self.not_finite |= set(found["not_finite"])
        self.routers.add_found(found["routers"])
        noise = self.candidate.rounding.noise
        for name, more in found["input_noise"].items():
            noise[name] = noise.get(name, 0.0) + more

    def compared(self, unit: Unit, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a unit in the original's scales; ``loaded`` are the weights as the model needs them."""
        names = [slot.name for slot in unit.slots]
        folded = any(key in self.candidate.unfolded for name in names for key in self.stream.names.sources(name))
        return self.stream.names.tensors(names, self.candidate.compared) if folded else loaded

    def outcome(self, order: Sequence[str], spans: Sequence[range]) -> Outcome:
        """Return the measurements, except the errors of weights.

        ``order`` lists the units as the model runs them, ``spans`` the chunk numbers of each text.
        """
        blocks = [BlockError(name, **error.row()) for name, error in self.blocks.items()]
        not_finite = min(self.not_finite, key=[*order, LOGITS].index, default=None)
        outcome = Outcome(not_finite=not_finite, blocks=blocks, routers=self.routers.rows())
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

    def mode(self, unit: Unit, measures: bool) -> RoundingMode:
        """Return the mode that rounds the inputs of a unit, whose weights are loaded, while it runs.

        With ``measures``, it also measures how much that changes the outputs, for the document's rows of weights.
        """
        return self.candidate.rounding.of_unit(unit, self.stream.names, measures)


class Draft(NamedTuple):
    """A draft: its model, its weights in the form of a candidate, and the number of tokens that both heads have."""

    architecture: Architecture
    candidate: Candidate
    vocabulary: int
    doubts: list[str]

    def cut(self, output: "ModelOutput") -> SimpleNamespace:
        """Return logits without the rows that stand for no token."""
        return SimpleNamespace(logits=output.logits[..., : self.vocabulary])


class DraftRun:
    """Runs a draft up to its head, which then gives the logits of a micro-batch as the original's head does."""

    def __init__(self, draft: Draft, batches: Sequence[Batch]) -> None:
        """Build the model.

        Raises:
            CheckpointError: the draft lacks a weight of its model, or has it in another shape.
            UsageError: the model has no head of its own.
        """
        self._draft, self._batches = draft, batches
        own, candidate = draft.architecture, draft.candidate
        model = own.build()
        names = complete(own.names(model, candidate.sides, candidate.names), candidate.sides)
        inputs = [own.workload.inputs(model, own.config, batch.given, batch.scored) for batch in batches]
        self.side = Running(candidate, Stream(model, names, candidate.get, inputs, own.device))
        head = head_of(model, self.side.stream.units)
        if head is None:
            raise UsageError(f"{DRAFT} {display(candidate.checkpoint.path)}: {type(model).__name__} has no head")
        self._head, self._pieces = head, Pieces(self.side.stream, head, inputs, own.device)

    def run_to_head(self, pace: RunSettings) -> None:
        """Run every unit but the head, which stays loaded, for every micro-batch.

        Raises:
            Interrupted: ``pace.stop`` was set.
        """
        stream, done = self.side.stream, 0
        while (unit := stream.next_unit) is not None and unit is not self._head:
            unit.load(stream.tensors(unit))
            mode = self.side.mode(unit, measures=False)
            for batch in range(len(self._batches)):
                if pace.stop.is_set():
                    raise Interrupted(STOPPED)
                if stream.waits(batch, unit):
                    self._run(batch, unit, mode)
                if pace.on_progress:
                    pace.on_progress(done, len(stream.units), batch + 1, len(self._batches))
            unit.free()
            give_back_memory()
            done += 1
        self._head.load(stream.tensors(self._head))
        self._mode = self.side.mode(self._head, measures=False)

    def _run(self, batch: int, unit: Unit, mode: RoundingMode) -> None:
        with mode:
            output = self.side.stream.run(batch)
        mode.forget()
        hidden = hidden_of(output)
        if hidden is not None and not are_finite(hidden):
            self.side.not_finite.add(unit.name)
        self.side.stream.resume(batch, output)

    def measure_piece(self, batch: int, base: "ModelOutput", first: int, last: int) -> None:
        """Compute the logits of some positions of a micro-batch and score them against the original's.

        Raises:
            UsageError: the logits do not follow from the inputs of the head.
        """
        given = self._batches[batch]
        if first == -CAUSAL.count_rows(given.raw, given.scored) and not self._pieces.begin(batch):
            name = type(self.side.stream.model).__name__
            raise UsageError(f"{DRAFT}: {name}'s logits are not what its head makes of its inputs: lower --context")
        with self._mode:
            result = self._pieces.compute(first, last)
        self._mode.forget()
        x, y = self._draft.cut(base), self._draft.cut(result)
        if not CAUSAL.measure_piece(x, y, first, given.raw, given.first, self.side.measures, given.scored):
            self.side.not_finite.add(LOGITS)
        if not last:
            self._pieces.end()

    def measure(self, batch: int, base: "ModelOutput") -> None:
        """Compute the logits of a micro-batch and score them against the original's."""
        self._run(batch, self._head, self._mode)
        result, given = self.side.stream.result(batch), self._batches[batch]
        x, y = self._draft.cut(base), self._draft.cut(result)
        workload = self._draft.architecture.workload
        if not workload.measure(x, y, given.raw, given.first, self.side.measures, given.scored):
            self.side.not_finite.add(LOGITS)


class Lockstep:
    """Runs the original and its candidates on the same tokens."""

    def __init__(
        self,
        architecture: Architecture | Denoiser,
        sides: Sides,
        candidates: Sequence[Candidate],
        chunks: Sequence[Chunks] | Calls,
        pace: RunSettings,
        with_floor: bool = False,
        drafts: Sequence[Draft] = (),
    ) -> None:
        """Build a model for each side; the only weights read here belong to no unit.

        With ``with_floor``, the original runs in its own dtype as well.

        Raises:
            CheckpointError: the model has a weight that is not stored, or has another shape.
            UsageError: the inputs of a head are needed, but the model has no head of its own.
        """
        self._workload, self._pace = architecture.workload, pace
        self.model = architecture.build()
        self._batches = batches_of(chunks, pace.batch)[pace.rank :: pace.world]
        if isinstance(chunks, Calls):
            chunks.check(self.model)
        self._spans = [] if isinstance(chunks, Calls) else spans_of(chunks)
        inputs = [
            self._workload.inputs(self.model, architecture.config, batch.given, batch.scored) for batch in self._batches
        ]
        names = complete(architecture.names(self.model, sides, sides.weights), sides)
        recorded = self._workload is CALLS
        self._original = Stream(self.model, names, sides.get, inputs, architecture.device, recorded=recorded)
        self._watch = RouterWatch(self.model)
        self._others = []
        for candidate in candidates:
            model = architecture.build()
            own = complete(architecture.names(model, candidate.sides, candidate.names), sides)
            stream = Stream(model, own, candidate.get, inputs, architecture.device, recorded=recorded)
            self._others.append(Running(candidate, stream))
        self._drafts = [DraftRun(draft, self._batches) for draft in drafts]
        self._floor: FloorRun | None = None
        if with_floor:
            self._floor = FloorRun(architecture, sides, self._batches)
        self._swaps: Swaps | None = None
        if pace.swap_blocks or pace.swap:
            self._swaps = Swaps(self._original, inputs, len(self._others), pace.swap_blocks, pace.swap)
        self._products: dict[str, Product] = {}
        self._unit_of: dict[str, str] = {}
        self.hidden: dict[int, Tensor] = {}  # inputs of the head, (chunks, positions, width), by micro-batch
        self.head: dict[str, Tensor] = {}  # weights of the head
        self._architecture, self._inputs = architecture, inputs
        self._head = head_of(self.model, self._original.units) if self._workload.kind == CAUSAL.kind else None
        self._pieces: list[Pieces] = []
        if pace.with_hidden and self._head is None:
            raise UsageError(f"{SAVE}: {type(self.model).__name__} has no head whose inputs could be kept")

    def __enter__(self) -> "Lockstep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self._original, *(side.stream for side in self._sides)):
            stream.close()
        if self._floor is not None:
            self._floor.close()

    def run(self) -> None:
        """Run every unit for every micro-batch of every side; drafts come first, up to their heads.

        Raises:
            Interrupted: ``stop`` was set.
        """
        done, total = 0, len(self._original.units)
        for draft in self._drafts:
            draft.run_to_head(self._pace)
        while (unit := self._original.next_unit) is not None:
            self._step(unit, done, total)
            done += 1

    def outcomes(self) -> list[Outcome]:
        """Return the measurements of each candidate."""
        found = []
        for n, side in enumerate(self._others):
            outcome = side.outcome([*self._original.units], self._spans)
            outcome.weights = self._weights(n)
            outcome.swaps = [] if self._swaps is None else self._swaps.scores(n)
            found.append(outcome)
        return found

    def draft_outcomes(self) -> list[Outcome]:
        """Return the measurements of each draft: its scores."""
        return [draft.side.outcome([*draft.side.stream.units], self._spans) for draft in self._drafts]

    @property
    def _sides(self) -> list[Running]:
        """The candidates, then the drafts."""
        return [*self._others, *(draft.side for draft in self._drafts)]

    def floor(self) -> Floor | None:
        """Return the error of the original in its own dtype; None where it did not run."""
        return None if self._floor is None else self._floor.result()

    def _step(self, unit: Unit, done: int, total: int) -> None:
        """Load a unit on all sides, run it for all micro-batches and free it; then do the same for the floor.

        So the floor's weights reuse the candidates' memory, except in a unit that ends forwards: the floor needs their
        results.
        """
        tensors = self._original.tensors(unit)
        unit.load(tensors)
        self._step_together(unit, tensors, done, total)
        unit.free()
        if self._floor is not None:
            self._floor.load(unit.name, tensors)
            for batch in range(len(self._batches)):
                self._floor.run(batch, unit.name, None)
            self._floor.free(unit.name)
        give_back_memory()

    def _step_together(self, unit: Unit, tensors: dict[str, Tensor], done: int, total: int) -> None:
        """Run a loaded unit of the original together with the candidates' units."""
        units = [side.stream.units[unit.name] for side in self._others]
        read: dict[int, dict[str, Tensor]] = {}  # by the weights of a candidate, which several roundings share
        for side in self._others:
            if id(side.candidate.found) not in read:
                read[id(side.candidate.found)] = _shared(side.stream.tensors(unit), tensors)
        others = [read[id(side.candidate.found)] for side in self._others]
        tokens = sum(batch.tokens for batch in self._batches)
        watching = OutputErrors(self._products, tokens, self._pace.with_moments)
        compared = [side.compared(unit, own) for side, own in zip(self._others, others, strict=True)]
        watching.watch(unit, compared)
        if self._swaps is not None:
            self._swaps.load(tensors, compared)
        self._unit_of |= {slot.name: unit.name for slot in unit.slots}
        for own, loaded in zip(units, others, strict=True):
            own.load(loaded)
        modes = [side.mode(own, measures=True) for side, own in zip(self._others, units, strict=True)]
        if unit is self._head and self._pace.with_hidden:
            self.head = {name: tensor.clone() for name, tensor in tensors.items()}
        for batch in range(len(self._batches)):
            if self._pace.stop.is_set():
                raise Interrupted(STOPPED)
            if self._original.waits(batch, unit):
                self._run(done, batch, unit, tensors, watching, modes)
            if self._pace.on_progress:
                self._pace.on_progress(done, total, batch + 1, len(self._batches))
        watching.finish()
        for own in units:
            own.free()

    def _run(
        self,
        done: int,
        batch: int,
        unit: Unit,
        tensors: dict[str, Tensor],
        watching: OutputErrors,
        modes: Sequence[RoundingMode],
    ) -> None:
        if unit is self._head and self._pace.with_hidden:
            self.hidden[self._batches[batch].number] = self._original.first_argument(batch).cpu()
        if unit is self._head and self._run_in_pieces(batch, unit, tensors, watching, modes):
            return
        with watching:
            output = self._original.run(batch)
        watching.settle()
        routed = self._watch.taken()
        x = hidden_of(output)
        if self._swaps is not None:
            self._swaps.run(batch, unit, output)
        self._original.resume(batch, output)
        del output
        base = self._original.result(batch)
        if base is not None and unit is self._head and self._pace.with_hidden and not batch:
            self._check_head(base)
        if self._floor is not None and base is not None:
            self._floor.load(unit.name, tensors)
            self._floor.run(batch, unit.name, base)
        if self._swaps is not None and base is not None:
            self._swaps.measure(batch, base, self._workload, self._batches[batch])
        for draft in self._drafts if base is not None else ():
            draft.measure(batch, base)
        for side, mode in zip(self._others, modes, strict=True):
            if not side.stream.waits(batch, unit):
                raise CheckpointError(f"the control flow of the models diverges at {display(unit.name)}")
            with mode:
                other = side.stream.run(batch)
            mode.forget()
            side.routers.add(self._batches[batch].number, routed, side.watch.taken())
            y = hidden_of(other)
            if x is not None and y is not None and base is None:
                error = side.blocks.setdefault(unit.name, HiddenError())
                if not error.add((done, self._batches[batch].number), x, y):
                    side.not_finite.add(unit.name)
            side.stream.resume(batch, other)
            del other
            result = side.stream.result(batch)
            if base is not None and result is not None:
                own = self._batches[batch]
                if not self._workload.measure(base, result, own.raw, own.first, side.measures, own.scored):
                    side.not_finite.add(LOGITS)

    def _run_in_pieces(
        self,
        batch: int,
        unit: Unit,
        tensors: dict[str, Tensor],
        watching: OutputErrors,
        modes: Sequence[RoundingMode],
    ) -> bool:
        """Run the loaded head for some positions at a time; return False if all positions must run at once."""
        assert isinstance(self._architecture, Architecture)  # noqa: S101 - denoisers have no head
        own, vocabulary = self._batches[batch], self._architecture.config.get_text_config().vocab_size
        rows = CAUSAL.count_rows(own.raw, own.scored)
        spans = spans_of_logits(len(own.raw), rows, vocabulary)
        streams = [self._original, *(side.stream for side in self._others)]
        if len(spans) < 2 or self._swaps is not None or not all(stream.waits(batch, unit) for stream in streams):
            return False
        if not self._pieces:
            device = self._architecture.device
            self._pieces = [Pieces(each, each.units[unit.name], self._inputs, device) for each in streams]
        if not all(pieces.begin(batch) for pieces in self._pieces):
            return False
        original, *others = self._pieces
        if self._floor is not None:
            self._floor.load(unit.name, tensors)
        for first, last in spans:
            with watching:
                base = original.compute(first, last)
            watching.settle()
            for side, mode, pieces in zip(self._others, modes, others, strict=True):
                with mode:
                    other = pieces.compute(first, last)
                mode.forget()
                if not CAUSAL.measure_piece(base, other, first, own.raw, own.first, side.measures, own.scored):
                    side.not_finite.add(LOGITS)
                del other
            if self._floor is not None:
                self._floor.run_piece(batch, unit.name, base, first, last)
            for draft in self._drafts:
                draft.measure_piece(batch, base, first, last)
            del base
        for pieces in self._pieces:
            pieces.end()
        return True

    def _check_head(self, base: "ModelOutput") -> None:
        """Check that the kept inputs of the head give the same logits again.

        Raises:
            UsageError: the logits differ, as the model computes something else between its blocks and its logits.
        """
        assert isinstance(self._architecture, Architecture)  # noqa: S101 - denoisers have no head
        again = Head(self._architecture, self.head)(self.hidden[self._batches[0].number], self._inputs[0])
        if not torch.equal(again.logits, base.logits):
            raise UsageError(f"{SAVE}: {type(self.model).__name__}'s logits are not what its head makes of its inputs")

    def _weights(self, n: int) -> list[WeightError]:
        """Return the output errors of a candidate's weights, the largest first."""
        totals: dict[str, float] = {}
        for name, product in self._products.items():
            totals[self._unit_of[name]] = totals.get(self._unit_of[name], 0.0) + product.noise[n]
        of_inputs, rows = self._others[n].candidate.rounding.noise, []
        for stored, names in self._by_stored_name().items():
            products, unit = [self._products[name] for name in names], self._unit_of[names[0]]
            noise, total = sum(product.noise[n] for product in products), totals[unit]
            signal = sum(product.signal for product in products)
            rounded = [of_inputs[name] for name in names if name in of_inputs]
            known = 0 < signal < inf and isfinite(noise)
            of_both = sum(rounded) + noise
            rows.append(
                WeightError(
                    layer_name=stored,
                    display_name=display(stored),
                    block=unit,
                    output_error=noise / signal if known else None,
                    share_of_block=noise / total if known and total > 0 else None,
                    inputs=max(product.inputs for product in products),
                    predicted_kld=None,
                    input_error=sum(rounded) / signal if known and rounded else None,
                    share_of_inputs=sum(rounded) / of_both if known and rounded and of_both > 0 else None,
                    input_spread=max((product.spread or 0.0 for product in products), default=0.0) or None,
                )
            )
        return sorted(rows, key=lambda row: (row.output_error is not None, -(row.output_error or 0.0)))

    def _by_stored_name(self) -> dict[str, list[str]]:
        """Return the watched parameters by stored name: several of them may be rows of one tensor."""
        found: dict[str, list[str]] = {}
        for name in self._products:
            found.setdefault(self._original.names.stored_name(name), []).append(name)
        return found

    def moments(self) -> Mapping[str, Product]:
        """Return the second moments of the inputs of each weight, by stored names."""
        return {stored: self._merge(names) for stored, names in self._by_stored_name().items()}

    def weights(self) -> Iterator[tuple[str, Tensor, Product]]:
        """Read each weight that had inputs again; yield its stored name, values and product."""
        names, get = self._original.names, self._original.get
        for stored, parts in self._by_stored_name().items():
            values = names.tensors(parts, get)[parts[0]] if len(parts) == 1 else get(stored)
            yield stored, values, self._merge(parts)

    def _merge(self, names: Sequence[str]) -> Product:
        """Return the product of a weight that is split into several parameters with the same inputs."""
        first = self._products[names[0]]
        if len(names) == 1:
            return first
        products = [self._products[name] for name in names]
        noise = [sum(each) for each in zip(*(product.noise for product in products), strict=True)]
        return replace(first, signal=sum(product.signal for product in products), noise=noise)

    def found(self) -> Found:
        """Return all measurements in the form that :meth:`add` of another process takes."""
        return {
            "products": {name: vars(product) for name, product in self._products.items()},
            "unit_of": self._unit_of,
            "sides": [side.found() for side in self._sides],
            "floor": None if self._floor is None else self._floor.found(),
            "swaps": None if self._swaps is None else self._swaps.parts(),
        }

    def add(self, found: Found) -> None:
        """Add another process's measurements on its share of the micro-batches."""
        self._unit_of |= found["unit_of"]
        for name, fields in found["products"].items():
            product = Product(**fields)
            if name in self._products:
                self._products[name].add(product)
            else:
                self._products[name] = product
        for side, other in zip(self._sides, found["sides"], strict=True):
            side.add(other)
        floor, swaps = found["floor"], found["swaps"]  # all ranks have them, or none
        if self._floor is not None:
            assert floor is not None  # noqa: S101
            self._floor.add(floor)
        if self._swaps is not None:
            assert swaps is not None  # noqa: S101
            self._swaps.add(swaps)


def _shared(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a candidate's weights; weights that equal the original's, as embeddings often do, share its memory."""
    return {name: tensors[name] if torch.equal(tensor, tensors[name]) else tensor for name, tensor in own.items()}


def complete(names: Names, sides: Sides) -> Names:
    """Check that every parameter of a model is stored, and return its names.

    Raises:
        CheckpointError: a parameter is not stored.
    """
    missing = names.missing()
    if missing:
        raise CheckpointError(
            f"{display(sides.checkpoint.path)}: lacks {listed(missing, MAX_NAMED)}, which the model of config.json has"
        )
    return names


class BesideReference:
    """Runs candidates on the tokens of a reference, whose logits come from the hidden states that it keeps."""

    def __init__(
        self,
        architecture: Architecture,
        sides: Sides,
        candidates: Sequence[Candidate],
        chunks: Sequence[Chunks],
        pace: RunSettings,
        reference: Reference,
    ) -> None:
        """Build a model for each candidate; the only weights read here belong to no unit.

        Raises:
            CheckpointError: a candidate lacks a weight of the model, or has it in another shape.
        """
        self._workload, self._pace, self._reference = architecture.workload, pace, reference
        self._batches = batches_of(chunks, pace.batch)
        self._head = reference.head(architecture)
        self.model = self._head.model
        self._spans = spans_of(chunks)
        self._inputs = [
            self._workload.inputs(self.model, architecture.config, batch.given, batch.scored) for batch in self._batches
        ]
        self._running = []
        for candidate in candidates:
            model = architecture.build()
            names = complete(architecture.names(model, sides, candidate.names), sides)
            stream = Stream(model, names, candidate.get, self._inputs, architecture.device)
            self._running.append(Running(candidate, stream))
        self._architecture, self._pieces = architecture, list[Pieces]()

    def __enter__(self) -> "BesideReference":
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._running:
            side.stream.close()

    def run(self) -> None:
        """Run every unit for every micro-batch of every candidate.

        Raises:
            Interrupted: ``stop`` was set.
        """
        first, done = self._running[0].stream, 0
        while (unit := first.next_unit) is not None:
            self._step(unit.name, done, len(first.units))
            done += 1

    def outcomes(self) -> list[Outcome]:
        """Return the measurements of each candidate: its scores."""
        return [side.outcome([*side.stream.units], self._spans) for side in self._running]

    def _step(self, name: str, done: int, total: int) -> None:
        units = [side.stream.units[name] for side in self._running]
        for side, unit in zip(self._running, units, strict=True):
            unit.load(side.stream.tensors(unit))
        modes = [side.mode(unit, measures=False) for side, unit in zip(self._running, units, strict=True)]
        for batch in range(len(self._batches)):
            if self._pace.stop.is_set():
                raise Interrupted(STOPPED)
            base = None
            in_pieces = self._run_in_pieces(batch, units, modes)
            for side, unit, mode in zip(self._running, units, modes, strict=True):
                if in_pieces or not side.stream.waits(batch, unit):
                    continue
                with mode:
                    output = side.stream.run(batch)
                mode.forget()
                hidden = hidden_of(output)
                if hidden is not None and not are_finite(hidden):
                    side.not_finite.add(name)
                side.stream.resume(batch, output)
                result = side.stream.result(batch)
                if result is not None:
                    if base is None:
                        base = self._head(self._reference.hidden(batch), self._inputs[batch])
                    own = self._batches[batch]
                    if not self._workload.measure(base, result, own.raw, own.first, side.measures, own.scored):
                        side.not_finite.add(LOGITS)
            if self._pace.on_progress:
                self._pace.on_progress(done, total, batch + 1, len(self._batches))
        for unit in units:
            unit.free()
        give_back_memory()

    def _run_in_pieces(self, batch: int, units: Sequence[Unit], modes: Sequence[RoundingMode]) -> bool:
        """Run the loaded heads as :class:`Lockstep` does; return False if all positions must run at once."""
        own, streams = self._batches[batch], [side.stream for side in self._running]
        vocabulary = self._architecture.config.get_text_config().vocab_size
        spans = spans_of_logits(len(own.raw), CAUSAL.count_rows(own.raw, own.scored), vocabulary)
        heads = [head_of(stream.model, stream.units) for stream in streams]
        waiting = all(stream.waits(batch, unit) for stream, unit in zip(streams, units, strict=True))
        if len(spans) < 2 or heads != list(units) or not waiting:
            return False
        if not self._pieces:
            given = self._inputs, self._architecture.device
            self._pieces = [Pieces(stream, unit, *given) for stream, unit in zip(streams, units, strict=True)]
        if not all(pieces.begin(batch) for pieces in self._pieces):
            return False
        hidden = self._reference.hidden(batch)
        for first, last in spans:
            rows = slice(hidden.shape[1] + first, hidden.shape[1] + last)
            base = self._head(hidden[:, rows], self._inputs[batch])
            for side, mode, pieces in zip(self._running, modes, self._pieces, strict=True):
                with mode:
                    other = pieces.compute(first, last)
                mode.forget()
                if not CAUSAL.measure_piece(base, other, first, own.raw, own.first, side.measures, own.scored):
                    side.not_finite.add(LOGITS)
        for pieces in self._pieces:
            pieces.end()
        return True
