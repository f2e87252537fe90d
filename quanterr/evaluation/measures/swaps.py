"""The divergence that one block or weight of a candidate causes in the original's model.

A swap is a forward of the original's model that takes the original's outputs up to the swapped unit. Only later units
are computed again, so that swapping each of L blocks computes L² / 2 units.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quanterr.documents.evaluation.model import SwapScore
from quanterr.errors import CheckpointError
from quanterr.evaluation.models.units import Unit, convert
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.stream import Stream
from quanterr.evaluation.running.workload import Measures, Workload
from quanterr.selection import LayerSelection
from quanterr.util.text import display


@dataclass
class Swap:
    """Parameters of one unit that are replaced by a candidate's, and what is measured with them."""

    name: str  # the unit's name, or the weight's stored name
    side: int  # number of the candidate
    unit: str
    slots: frozenset[str]  # names of the parameters in the model
    places: dict[int, int]  # micro-batch → its forward in the original's stream
    changed: set[int] = field(default_factory=set)  # micro-batches whose states are no longer the original's
    measures: Measures = field(default_factory=Measures)
    not_finite: bool = False


class Swaps:
    """All swaps of all candidates, which run through the original's model together."""

    def __init__(
        self,
        stream: Stream,
        workload: Workload,
        batches: Mapping[int, Batch],
        candidates: int,
        blocks: bool,
        patterns: Iterable[str],
    ) -> None:
        """Start a forward pass for each swap and micro-batch.

        Every unit is swapped if ``blocks`` is True, and each weight that ``patterns`` select.

        Raises:
            UsageError: a pattern names no weight.
        """
        self._stream, self._workload, self._batches = stream, workload, batches
        self.swaps = [
            Swap(name, side, unit, slots, {batch: stream.begin(stream.get_inputs(batch)) for batch in batches})
            for side in range(candidates)
            for name, unit, slots in _choose_swaps(stream, blocks, LayerSelection(patterns))
        ]
        self._candidate_tensors: dict[int, Mapping[str, Tensor]] = {}
        self._tensors: Mapping[str, Tensor] = {}

    def load(self, tensors: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> None:
        """Keep the weights of the loaded unit: the original's and each candidate's."""
        self._tensors, self._candidate_tensors = tensors, dict(enumerate(others))

    def run(self, batch: int, unit: Unit, output: object) -> None:
        """Run the unit for a micro-batch of each swap; ``output`` is what the original's unit returned."""
        for swap in self.swaps:
            place = swap.places[batch]
            if not self._stream.waits(place, unit):
                raise CheckpointError(f"the control flow of the model diverges at {display(unit.name)}")
            differing: dict[str, Tensor] = {}
            if swap.unit == unit.name:
                weights = self._candidate_tensors[swap.side]
                names = (name for name in swap.slots if not torch.equal(weights[name], self._tensors[name]))
                differing = {name: weights[name] for name in names}
            if differing or batch in swap.changed:
                swap.changed.add(batch)
                with _swap_weights(unit, differing, self._tensors):
                    swapped_output = self._stream.run(place)
            else:
                self._stream.take_call(place)
                swapped_output = deepcopy(output)  # the model may change it in place
            self._stream.resume(place, swapped_output)

    def measure(self, batch: int, base: object) -> None:
        """Compare the results of a micro-batch with the original's."""
        for swap in self.swaps:
            result = self._stream.result(swap.places[batch])
            finite = self._workload.measure(base, result, self._batches[batch], swap.measures)
            swap.not_finite = swap.not_finite or not finite

    def scores(self, side: int) -> list[SwapScore]:
        """Return the divergences that the swaps of a candidate cause, the largest first."""
        swaps = []
        for swap in self.swaps:
            if swap.side == side:
                scores = None if swap.not_finite else swap.measures.scores.result()
                swaps.append(
                    SwapScore(
                        name=swap.name,
                        display_name=display(swap.name),
                        block=swap.unit,
                        kld_mean=None if scores is None else scores["kld_mean"],
                        kld_mean_se=None if scores is None else scores["kld_mean_se"],
                        kld_mean_chunk_se=None if scores is None else scores["kld_mean_chunk_se"],
                        top1=None if scores is None else scores["top1"],
                    )
                )
        return sorted(swaps, key=lambda score: (score.kld_mean is not None, -(score.kld_mean or 0.0)))

    def merge(self, others: Sequence[Swap]) -> None:
        """Add the measurements of another process on its share of the micro-batches."""
        for swap, other in zip(self.swaps, others, strict=True):
            swap.measures.merge(other.measures)
            swap.not_finite = swap.not_finite or other.not_finite


def _choose_swaps(stream: Stream, blocks: bool, wanted: LayerSelection) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield the name, the unit and the parameters of each swap.

    Raises:
        UsageError: a pattern names no weight.
    """
    stored: dict[str, tuple[str, set[str]]] = {}
    for unit in stream.units.values():
        names = [slot.name for slot in unit.slots]
        if blocks:
            yield unit.name, unit.name, frozenset(names)
        for name in names:
            stored.setdefault(stream.names.stored_name(name), (unit.name, set()))[1].add(name)
    if wanted.patterns:
        wanted.check(stored)
        for name, (unit_name, slots) in stored.items():
            if wanted.takes(name):
                yield name, unit_name, frozenset(slots)


@contextmanager
def _swap_weights(unit: Unit, replacements: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace weights of a unit within the context."""
    slots = [slot for slot in unit.slots if slot.name in replacements]
    for slot in slots:
        slot.fill(convert(replacements[slot.name], slot))
    try:
        yield
    finally:
        for slot in slots:
            slot.fill(convert(tensors[slot.name], slot))
