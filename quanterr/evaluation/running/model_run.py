"""A model with one unit loaded at a time, and the loop that runs all its units for all micro-batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import torch
from torch import Tensor

from quanterr.errors import Interrupted
from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.logits import Tail
from quanterr.evaluation.running.rounding import Rounding
from quanterr.evaluation.running.stream import Stream
from quanterr.evaluation.running.workload import CAUSAL, Measures, Workload
from quanterr.util.platform import give_back_memory

STOPPED = "no scores: interrupted before the last block"

OnProgress = Callable[[int, int, int, int], None]  # numbers of done and of all units, then of micro-batches


def take_turns(
    stream: Stream,
    load: Callable[[Unit], None],
    free: Callable[[], None],
    stop: Event | None = None,
    on_progress: OnProgress | None = None,
    until: Unit | None = None,
) -> Iterator[int]:
    """Load the units of a model in order; yield each micro-batch that waits for the loaded unit, then free the unit.

    The caller runs the unit for each yielded micro-batch. The loop ends before the unit ``until``.

    Raises:
        Interrupted: ``stop`` was set.
    """
    done = 0
    while (unit := stream.next_unit) is not None and unit is not until:
        load(unit)
        for batch in stream.batches:
            if stop is not None and stop.is_set():
                raise Interrupted(STOPPED)
            if stream.waits(batch, unit):
                yield batch
            if on_progress:
                on_progress(done, len(stream.units), batch + 1, len(stream.batches))
        free()
        give_back_memory()
        done += 1


class ModelRun:
    """A model with one unit loaded at a time."""

    unit: Unit  # the loaded unit
    mode: AbstractContextManager[object] = nullcontext()  # the context in which units run

    def __init__(self, stream: Stream, rounding: Rounding | None = None, measures_rounding: bool = False) -> None:
        """Use a stream; round inputs, keys and values by ``rounding``, and measure its effect if asked."""
        self.stream, self._rounding, self._measures_rounding = stream, rounding, measures_rounding
        self.loads = 0  # number of units that were loaded
        self._tail: Tail | None = None
        self._batch, self._hidden = 0, torch.empty(0)  # inputs of the head, (chunks, positions, width)

    def load(self, unit: Unit, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Load this model's unit of the same name with ``tensors``, or read its weights if None."""
        self.unit, self.loads = self.stream.units[unit.name], self.loads + 1
        self.unit.load(self.stream.tensors(self.unit) if tensors is None else tensors)
        if self._rounding is not None:
            self.mode = self._rounding.of_unit(self.unit, self.stream.names, self._measures_rounding)

    def run(self, batch: int, see: Callable[[object], None] = lambda _: None) -> Any:
        """Run the loaded unit for a micro-batch that waits for it; return the result of a forward that ends, or None.

        ``see`` gets the output of the unit before the model goes on and may change it.
        """
        with self.mode:
            output = self.stream.run(batch)
        see(output)
        self.stream.resume(batch, output)
        return self.stream.result(batch)

    def begin(self, batch: int) -> bool:
        """Prepare :meth:`compute` for a micro-batch at the loaded head; return False if all positions must run at once.

        That is so if a model changes what its body returns before the head gets it, as logits would then be wrong.
        """
        if not self.stream.waits(batch, self.unit):
            return False
        self._tail = self._tail or Tail(self.stream.model, self.stream.device)
        self._batch, self._hidden = batch, self.stream.first_argument(batch)
        seen: list[Tensor] = []
        watch = self.unit.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        self._compute(-1, 0)
        watch.remove()
        return len(seen) == 1 and torch.equal(seen[0], self._hidden[:, -1:])

    def compute(self, first: int, last: int) -> Any:
        """Return the model's result for some positions, counted from the end, such as -2 to 0 for the last two."""
        with self.mode:
            return self._compute(first, last)

    def _compute(self, first: int, last: int) -> Any:
        assert self._tail is not None  # noqa: S101 - begin() made it
        rows = self._hidden.shape[1]
        return self._tail(self._hidden[:, rows + first : rows + last], self.stream.get_inputs(self._batch))

    def end(self, batch: int) -> None:
        """End the forward of a micro-batch whose positions were computed."""
        self.stream.end(batch)
        self._hidden = torch.empty(0)

    def free(self) -> None:
        """Free the loaded unit."""
        self.unit.free()

    def close(self) -> None:
        """End all forwards."""
        self.stream.close()


class MeasuredRun(ModelRun):
    """A run whose outputs are measured against the original's."""

    def __init__(
        self,
        stream: Stream,
        workload: Workload,
        batches: Mapping[int, Batch],
        rounding: Rounding | None = None,
        measures_rounding: bool = False,
    ) -> None:
        """Start without measurements."""
        super().__init__(stream, rounding, measures_rounding)
        self.measures, self._workload, self._batches = Measures(), workload, batches

    def measure(self, batch: int, base: Any, result: Any) -> bool:
        """Measure the result of a micro-batch against the original's; return whether all values are finite."""
        return self._workload.measure(base, result, self._batches[batch], self.measures)

    def measure_piece(self, batch: int, base: Any, result: Any, first: int) -> bool:
        """Measure the logits of the positions from ``first`` on, as :meth:`measure` does."""
        return CAUSAL.measure_piece(base, result, first, self._batches[batch], self.measures)
