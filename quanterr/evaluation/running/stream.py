"""A model of any size in the memory of one unit: its own forward waits at each unit until the driver has run that.

Every micro-batch runs the forward of the model in a greenlet of its own, which hands over (unit, arguments) and waits.
So the model's own code makes masks, rotary tables, caches between blocks and soft caps, and the driver loads the
weights of a unit once for all micro-batches. Greenlets are not threads: thousands of them cost only memory.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from quanterr.errors import CheckpointError, QuanterrError, UsageError
from quanterr.evaluation.denoisers.calls import map_tensors
from quanterr.evaluation.extras import EXTRA
from quanterr.evaluation.models.building import Architecture, Denoiser
from quanterr.evaluation.models.names import Get, Names
from quanterr.evaluation.models.units import Unit, convert, list_kept_slots, units_of
from quanterr.evaluation.models.weights import OriginalWeights
from quanterr.evaluation.running.batches import Batch
from quanterr.evaluation.running.workload import CALLS
from quanterr.util.memory import is_out_of_memory
from quanterr.util.text import display, itemize

try:
    from greenlet import getcurrent, greenlet
except ImportError as error:
    raise UsageError(EXTRA) from error

if not torch.cuda.is_available():
    # transformers asks whether a CUDA stream is being captured. Builds of torch for CUDA raise an error then if there
    # is no driver, and while they make it in a greenlet the process crashes: its callers' frames are not on the stack.
    torch.cuda.is_current_stream_capturing = lambda: False

UnitCall = tuple[Unit, tuple[object, ...], dict[str, object]]  # a unit and the arguments of its forward


class _Forward(greenlet):
    """One forward of the model, which waits where it needs a unit."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, object], graph: bool, recorded: bool) -> None:
        super().__init__()
        self.model, self.inputs, self.graph, self._recorded = model, inputs, graph, recorded
        self.asked: UnitCall | None = None
        self.result: object = None

    def run(self, _: object) -> None:
        """Run the model, in the greenlet."""
        self.result = self.model(**self.inputs)

    def ask(self, *asked: *UnitCall) -> object:
        """Hand the arguments of a unit over to the driver, and return its answer."""
        self.asked, driver = asked, self.parent
        assert driver is not None  # noqa: S101 - it created this greenlet
        return driver.switch()

    def resume(self, answer: object = None) -> None:
        """Continue with the output of the unit, until the next unit or the end.

        A greenlet runs in the torch modes that the thread has when it is resumed, so they are set here, at every
        switch.
        """
        self.asked, answers = None, [answer]
        del answer
        try:
            with torch.enable_grad() if self.graph else torch.inference_mode():
                self.switch(answers.pop())
        except Exception as error:
            raise explain_failure(error, self.model, self._recorded) from error


def explain_failure(error: BaseException, model: nn.Module, recorded: bool) -> BaseException:
    """Turn an error in the model's own code into one that names the model and, if there are any, the recorded calls."""
    if isinstance(error, QuanterrError) or is_out_of_memory(error):
        return error
    name, reason = type(model).__name__, display(str(error), 300)
    if recorded:
        return UsageError(f"--inputs: {name} cannot take a call: {reason}")
    return CheckpointError(f"config.json: transformers' {name} cannot read tokens alone: {reason}")


class Stream:
    """The model of one side, and its forwards of all micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        get: Get,
        batches: Mapping[int, Mapping[str, object]],
        device: torch.device,
        graph: bool = False,
        recorded: bool = False,
    ) -> None:
        """Start a forward for each micro-batch, whose arguments are ``batches``; all stop at the first unit.

        ``get`` returns tensors on the device. With ``graph``, code between units keeps what a backward pass needs.
        With ``recorded``, the batches are recorded calls, which errors then mention.
        """
        self.model, self.names, self.get, self._recorded = model, names, get, recorded
        self.units = units_of(model, device)
        kept = list_kept_slots(model, self.units)
        tensors = names.tensors([slot.name for slot in kept], get)
        for slot in kept:
            slot.fill(convert(tensors[slot.name], slot))
        for unit in self.units.values():
            unit.free()
            unit.module.forward = partial(self._call_unit, unit)
        self.device, self._graph, self.batches = device, graph, list(batches)
        self._forwards: dict[int, _Forward] = {}
        for number, given in batches.items():
            self._begin(number, given)

    def _call_unit(self, unit: Unit, *args: object, **kwargs: object) -> object:
        forward = getcurrent()
        return forward.ask(unit, args, kwargs) if isinstance(forward, _Forward) else unit.forward(*args, **kwargs)

    def begin(self, given: Mapping[str, object]) -> int:
        """Start one more forward, which stops at the first unit; return its number."""
        number = max(self._forwards) + 1
        self._begin(number, given)
        return number

    def _begin(self, number: int, given: Mapping[str, object]) -> None:
        on_device = {key: map_tensors(value, lambda tensor: tensor.to(self.device)) for key, value in given.items()}
        forward = self._forwards[number] = _Forward(self.model, on_device, self._graph, self._recorded)
        forward.resume()

    def get_inputs(self, batch: int) -> Mapping[str, object]:
        """Return the arguments of a micro-batch, on the device."""
        return self._forwards[batch].inputs

    @property
    def next_unit(self) -> Unit | None:
        """The first unit, in the order of the model, that some forward waits for; None if all have ended.

        Chunks with images wait for units that other chunks do not use; with the first unit, all wait for the same one
        later.
        """
        asked = {forward.asked[0].name for forward in self._forwards.values() if forward.asked}
        return next((unit for name, unit in self.units.items() if name in asked), None)

    def tensors(self, unit: Unit) -> dict[str, Tensor]:
        """Return the weights of a unit, dequantized."""
        return self.names.tensors([slot.name for slot in unit.slots], self.get)

    def waits(self, batch: int, unit: Unit) -> bool:
        """Return whether a micro-batch of the stream waits for that unit."""
        asked = self._forwards[batch].asked
        return asked is not None and asked[0].name == unit.name

    def run(self, batch: int) -> object:
        """Run the unit that a micro-batch waits for, whose weights are loaded, and return its output."""
        unit, args, kwargs = self.take_call(batch)
        try:
            with torch.inference_mode():
                return unit.forward(*args, **kwargs)
        except Exception as error:
            raise explain_failure(error, self.model, self._recorded) from error

    def take_call(self, batch: int) -> UnitCall:
        """Return the unit that a micro-batch waits for and its arguments, without keeping these."""
        asked = self._forwards[batch].asked
        assert asked is not None  # noqa: S101 - the caller has asked waits()
        self._forwards[batch].asked = None
        return asked

    def first_argument(self, batch: int) -> Tensor:
        """Return the first argument of the unit that a micro-batch waits for: hidden states."""
        asked = self._forwards[batch].asked
        assert asked is not None  # noqa: S101 - the caller has asked waits()
        _, args, _ = asked
        argument = args[0]
        assert isinstance(argument, Tensor)  # noqa: S101 - a linear layer gets one
        return argument

    def resume(self, batch: int, output: object) -> None:
        """Pass the output to the forward of a micro-batch, which continues to its next unit or to its end."""
        self._forwards[batch].resume(output)

    def result(self, batch: int) -> object:
        """Return the result of a micro-batch, and forget it to free memory; None before the forward has ended."""
        forward = self._forwards[batch]
        result, forward.result = forward.result, None
        return result

    def end(self, batch: int) -> None:
        """Stop the forward of a micro-batch, wherever it waits."""
        forward = self._forwards[batch]
        forward.asked = None
        if forward:  # true for a greenlet that has begun and not ended
            forward.throw()

    def close(self) -> None:
        """End all forwards."""
        for batch in self._forwards:
            self.end(batch)


def open_stream(
    architecture: Architecture | Denoiser,
    weights: OriginalWeights,
    stored: Iterable[str],
    get: Get,
    batches: Mapping[int, Batch],
    like: Stream | None = None,
) -> Stream:
    """Build a model, start a forward for each micro-batch, and read only the weights that belong to no unit.

    ``stored`` are the names of the tensors that ``get`` returns, with the shapes of the original's ``weights``.
    ``like`` is a stream of the same architecture, whose arguments are used again.

    Raises:
        CheckpointError: the model has a weight that is not stored, or has another shape.
    """
    model, workload = architecture.build(), architecture.workload
    names = architecture.names(model, weights, stored)
    if missing := names.missing():
        raise CheckpointError(
            f"{display(weights.checkpoint.path)}: lacks {itemize(missing, 3)}, which the model of config.json has"
        )
    given: dict[int, Mapping[str, object]] = {}
    for n, batch in batches.items():
        arguments = None if like is None else like.get_inputs(n)
        given[n] = arguments or workload.inputs(model, architecture.config, batch)
    return Stream(model, names, get, given, architecture.device, recorded=workload is CALLS)
