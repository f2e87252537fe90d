"""The run of the original, in which the outputs of weights are measured."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from quanterr.evaluation.files.references import KeptHead
from quanterr.evaluation.measures.hidden_states import find_hidden_states
from quanterr.evaluation.measures.outputs_of_weights import OutputErrors
from quanterr.evaluation.measures.routers import RouterWatch
from quanterr.evaluation.measures.swaps import Swaps
from quanterr.evaluation.measures.weight_errors import WeightErrors
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.candidate import Step
from quanterr.evaluation.running.model_run import ModelRun
from quanterr.evaluation.running.stream import Stream


class OriginalRun(ModelRun):
    """The run of the original, in which the outputs of weights are measured."""

    def __init__(
        self,
        stream: Stream,
        batches: Mapping[int, Batch],
        with_moments: bool = False,
        swaps: Swaps | None = None,
        kept: KeptHead | None = None,
    ) -> None:
        """Run ``swaps`` as well, and add the inputs of the head to ``kept``."""
        super().__init__(stream)
        self.errors, self.swaps, self.kept = WeightErrors(stream.names), swaps, kept
        self._batches, self._with_moments = batches, with_moments
        self._watch = RouterWatch(stream.model)
        self.tensors: Mapping[str, Tensor] = {}

    def load(self, unit: Unit, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Load the unit of this name."""
        self.tensors = self.stream.tensors(unit) if tensors is None else tensors
        super().load(unit, self.tensors)

    def watch(self, others: Sequence[Mapping[str, Tensor]]) -> None:
        """Measure the outputs of the loaded unit's weights, and how those of each candidate change them."""
        tokens = sum(batch.tokens for batch in self._batches.values())
        self.mode = self._outputs = OutputErrors(self.errors.products, tokens, self._with_moments)
        self._outputs.watch(self.unit, others)
        self.errors.unit_of |= {slot.name: self.unit.name for slot in self.unit.slots}
        if self.swaps is not None:
            self.swaps.load(self.tensors, others)
        if self.kept is not None and self.unit is self.kept.unit:
            self.kept.weights = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def lead(self, batch: int) -> Step:
        """Run the loaded unit for a micro-batch, and for each swap.

        Raises:
            UsageError: the inputs of the head are kept, but the logits do not follow from them.
        """
        self._keep_inputs(batch)
        with self.mode:
            output = self.stream.run(batch)
        hidden, routed = find_hidden_states(output), self._watch.take()
        if self.swaps is not None:
            self.swaps.run(batch, self.unit, output)
        self.stream.resume(batch, output)
        del output
        result = self.stream.result(batch)
        if result is not None and self.kept is not None and self.unit is self.kept.unit and not batch:
            self.kept.check(self._batches[batch].number, self.stream.get_inputs(batch), result)
        if result is not None and self.swaps is not None:
            self.swaps.measure(batch, result)
        return Step(hidden, routed, lambda: result)

    def begin(self, batch: int) -> bool:
        """Prepare :meth:`compute`; return False if there are swaps, or all of the micro-batch must run at once."""
        self._keep_inputs(batch)
        return self.swaps is None and super().begin(batch)

    def _keep_inputs(self, batch: int) -> None:
        if self.kept is not None and self.unit is self.kept.unit:
            self.kept.hidden[self._batches[batch].number] = self.stream.first_argument(batch).cpu()

    def free(self) -> None:
        """Compute the remaining errors of the loaded unit's weights, and free the unit."""
        self._outputs.finish()
        del self.mode, self._outputs
        self.tensors = {}
        super().free()
