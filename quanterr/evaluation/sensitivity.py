"""The sensitivity of each weight of a model, from one backward pass through it, unit by unit.

fisher.py        language models: the divergence of the predicted tokens
gauss_newton.py  recorded calls: the error of the output

The forward pass keeps the inputs of each unit; the backward pass loads each unit again, in reverse, and recomputes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quanterr.evaluation.stepping import Stream
from quanterr.evaluation.units import Unit


class Part(NamedTuple):
    """A matrix within a parameter of the model: an expert of a stack, a run of outputs, or all of it."""

    expert: int | None = None
    first: int = 0  # output
    stop: int | None = None

    def of(self, weight: Tensor, transposed: bool) -> Tensor:
        """Return the matrix; ``transposed``: the parameter is stored [in, out], or [experts, in, out]."""
        matrix = weight if self.expert is None else weight[self.expert]
        return matrix[:, self.first : self.stop] if transposed else matrix[self.first : self.stop]


WHOLE = Part()
PartsOf = Callable[[str, tuple[int, ...]], Iterable[Part]]  # of a parameter with that name and shape


def parts_of_shape(_: str, shape: tuple[int, ...]) -> list[Part]:
    """Return the experts of a stack; of a matrix, and of the kernel of a convolution, all of it."""
    return [WHOLE] if len(shape) != 3 else [Part(expert) for expert in range(shape[0])]


class Curvature(ABC):
    """The weight that errors of a matrix have in the errors of the model's outputs, for ``scored`` outputs of it."""

    transposed: bool  # the parameter is stored [in, out]
    is_table: bool  # an embedding, whose rows are chosen
    energy: float  # ‖W‖²
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def is_used(self) -> bool:
        """True if the matrix took part; an expert without tokens did not."""

    @abstractmethod
    def complete(self, part: Part, weight: Tensor, transposed: bool) -> None:
        """Keep what the parameter itself says of its part; ``transposed``: it is stored [in, out]."""

    @abstractmethod
    def predicted(self, error: Tensor, scored: int) -> float:
        """Return what an error of the matrix costs, by prediction; NaN where nothing is known."""

    @abstractmethod
    def alpha(self, scored: int) -> float:
        """Return alpha: an error that is spread evenly costs about alpha · NMSE; NaN where nothing is known."""

    @abstractmethod
    def alpha_se(self, scored: int) -> float:
        """Return the standard error of alpha; NaN where it is not known."""


@dataclass
class _Step:
    """A unit that a micro-batch has passed."""

    unit: Unit
    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object  # with leaves, whose gradients come from above


@dataclass
class Profile:
    """The curvature of every matrix of a model, by names of the model and parts of these parameters."""

    scored: int = 0
    found: dict[str, dict[Part, Curvature]] = field(default_factory=dict)


class Recorder(Protocol):
    """Collects the curvatures of a unit while it runs again, once for each micro-batch."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...

    def settle(self) -> None:
        """Take the gradients of the unit's weights for the micro-batch that ends."""


class Method(Protocol):
    """The measure of a model's outputs whose curvature is wanted."""

    def backward(self, number: int, result: object) -> int:
        """Compute gradients at the result of micro-batch ``number``; return how many outputs that scores."""

    def record(self, unit: Unit, made: "Profile", parts_of: PartsOf) -> Recorder:
        """Return a recorder for a loaded unit, which puts what it finds into ``made``."""


def profile(
    stream: Stream,
    batches: int,
    method: Method,
    seen: Callable[[Unit, Profile], None] | None = None,
    parts_of: PartsOf = parts_of_shape,
) -> Profile:
    """Go through the model and back.

    ``stream`` was started with ``graph``. ``seen`` is called with each unit on the way back, while its weights are
    loaded and their curvatures are complete. An expert that no token was sent to costs nothing.
    """
    tapes: list[list[_Step]] = [[] for _ in range(batches)]
    order: list[Unit] = []
    while (unit := stream.next_unit) is not None:
        _forward(stream, unit, tapes)
        order.append(unit)
    made = Profile()
    for batch in range(batches):
        made.scored += method.backward(batch, stream.result(batch))
    for unit in reversed(order):
        unit.load(stream.tensors(unit))
        _backward(unit, tapes, method.record(unit, made, parts_of))
        for slot in unit.slots:
            parts = made.found.get(slot.name, {})
            turned = any(curvature.transposed for curvature in parts.values())
            for part, curvature in parts.items():
                curvature.complete(part, slot.tensor.detach(), turned)
        if seen is not None:
            seen(unit, made)
        unit.free()
    return made


def _forward(stream: Stream, unit: Unit, tapes: Sequence[list[_Step]]) -> None:
    unit.load(stream.tensors(unit))
    for batch, tape in enumerate(tapes):
        if not stream.waits(batch, unit):
            continue
        own, args, kwargs = stream.taken(batch)
        with torch.no_grad():
            output = own.forward(*args, **kwargs)
        leaves = _mapped(output, lambda tensor: tensor.detach().requires_grad_())
        tape.append(_Step(own, args, kwargs, leaves))
        with torch.enable_grad():
            stream.resume(batch, _mapped(leaves, lambda tensor: tensor.clone()))
    unit.free()


def _backward(unit: Unit, tapes: Sequence[list[_Step]], recorder: Recorder) -> None:
    """Run the unit again for each micro-batch, with a graph; gradients go on to what is below it."""
    if not any(step.unit is unit and _requiring(step) for tape in tapes for step in tape):
        for slot in unit.slots:  # nothing with a gradient comes in: let it end in the weight
            if not slot.is_buffer:
                slot.tensor.requires_grad_(True)
    for tape in tapes:
        for step in [step for step in tape if step.unit is unit][::-1]:
            _step_back(unit, step, recorder)
            tape.remove(step)
        recorder.settle()


def _step_back(unit: Unit, step: _Step, recorder: Recorder) -> None:
    inputs = _tensors((step.args, step.kwargs))
    fresh = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs}

    def renewed(tensor: Tensor) -> Tensor:
        return fresh[id(tensor)]

    with torch.enable_grad(), recorder:
        output = unit.forward(*_mapped(step.args, renewed), **_mapped(step.kwargs, renewed))
    pairs = [
        (made, leaf.grad)
        for made, leaf in zip(_tensors(output), _tensors(step.output), strict=True)
        if leaf.grad is not None and made.requires_grad
    ]
    if pairs:
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
    below = [(tensor, fresh[id(tensor)].grad) for tensor in inputs if tensor.requires_grad]
    known = [(tensor, gradient) for tensor, gradient in below if gradient is not None]
    if known:
        torch.autograd.backward([tensor for tensor, _ in known], [gradient for _, gradient in known], retain_graph=True)


def _requiring(step: _Step) -> bool:
    return any(tensor.requires_grad for tensor in _tensors((step.args, step.kwargs)))


def _tensors(value: Any) -> list[Tensor]:
    """Return the floating tensors in arguments or outputs, in their order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple | list) else []


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same with its floating tensors changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        changed = {key: _mapped(item, change) for key, item in value.items()}
        return type(value)(**changed) if type(value) is not dict else changed
    if isinstance(value, tuple):
        parts = [_mapped(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value
