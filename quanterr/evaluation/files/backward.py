"""The sensitivity of each weight, from one backward pass through the model, unit by unit.

fisher.py        for language models: sensitivity of the divergence of the predicted tokens
gauss_newton.py  for recorded calls: sensitivity of the error of the output

Both compute a gradient G of each weight for each chunk or call. If errors of elements are independent, an error e
costs Σ_ij e_ij² Σ G_ij² / scored. For an error with the same NMSE in each row, spread evenly over c columns,
this is alpha · NMSE with

    alpha = Σ_i (Σ_j Σ G_ij² / scored) · ‖W_i‖² / c

Quantizers with scales by rows or groups cause such errors. To assume errors that are spread evenly over the matrix
would be less exact: rows of large weights have large errors, and often large gradients.

G is the gradient over all tokens, Σ_t g_t x_tᵀ, because the error of a weight is the same for all tokens: a sum of
g_ti² x_tj² would leave out the products between tokens.

The forward pass keeps the inputs of each unit. The backward pass loads the units again in reverse order, and computes
each again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import stdev
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quanterr.evaluation.models.units import Unit
from quanterr.evaluation.running.model_run import ModelRun, take_turns
from quanterr.evaluation.running.stream import Stream


class Part(NamedTuple):
    """A matrix within a parameter of the model: an expert of a stack, some consecutive outputs, or all of it."""

    expert: int | None = None
    first: int = 0  # row, as stored
    stop: int | None = None

    def of(self, weight: Tensor) -> Tensor:
        """Return the matrix."""
        return (weight if self.expert is None else weight[self.expert])[self.first : self.stop]


WHOLE = Part()
PartsOf = Callable[[str, tuple[int, ...]], Iterable[Part]]  # returns the parts of a parameter with that name and shape


def parts_of_shape(_: str, shape: tuple[int, ...]) -> list[Part]:
    """Return the experts of a stack, or the whole of a matrix or of a convolution kernel."""
    return [WHOLE] if len(shape) != 3 else [Part(expert) for expert in range(shape[0])]


@dataclass
class Curvature:
    """The squared gradients of a matrix, summed over chunks or calls."""

    squares: Tensor | None = None  # (rows, columns) as stored; None if no output depended on the matrix
    rows: list[Tensor] = field(default_factory=list)  # sums over the columns for each chunk or call, (rows,) float64
    costs: list[float] = field(default_factory=list)  # cost of an error with an NMSE of 1, for each chunk or call
    energy: float = 0.0  # ‖W‖²
    shape: tuple[int, ...] = ()

    @property
    def is_used(self) -> bool:
        """True if an output depended on the matrix, unlike an expert without tokens."""
        return any(bool(rows.any()) for rows in self.rows)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of a chunk or call."""
        squares = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square()
        self.rows.append(squares.flatten(1).sum(1, dtype=torch.float64))
        self.squares = squares if self.squares is None else self.squares.add_(squares)

    def complete(self, matrix: Tensor) -> None:
        """Keep the shape and energy of the matrix, and what an error with the same NMSE in each row costs."""
        energies = matrix.double().square().flatten(1)
        of_rows, columns = energies.sum(1), max(energies.shape[1], 1)
        self.energy, self.shape = float(of_rows.sum()), tuple(matrix.shape)
        self.costs = [float(rows @ of_rows) / columns for rows in self.rows]

    def predict_cost(self, error: Tensor, scored: int) -> float:
        """Return the predicted cost of an error of the matrix."""
        if self.squares is None:
            return 0.0
        return float((error.square() * self.squares).sum(dtype=torch.float64)) / scored

    def alpha(self, scored: int) -> float:
        """Return alpha, where an error with the same NMSE in each row costs about alpha · NMSE."""
        return sum(self.costs) / scored

    def alpha_se(self, scored: int) -> float:
        """Return the standard error of alpha over chunks or calls; NaN for fewer than two, or if all cost nothing."""
        if len(self.costs) < 2 or not any(self.costs):
            return float("nan")
        return sqrt(len(self.costs)) * stdev(self.costs) / scored


@dataclass
class _Step:
    """The inputs and outputs of a unit for a micro-batch, in the forward pass."""

    unit: Unit
    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object  # tensors that are leaves; the units after this one compute their gradients


@dataclass
class Profile:
    """The curvature of every matrix of a model, by parameter and part."""

    scored: int = 0
    by_part: dict[str, dict[Part, Curvature]] = field(default_factory=dict)


class Method(Protocol):
    """A measure of a model's outputs, whose curvature is computed."""

    def backward(self, number: int, result: object) -> int:
        """Compute gradients at the result of micro-batch ``number``; return the number of scored outputs."""


class _Gradients:
    """The gradients of a unit's weights, which are squared and added up after each micro-batch."""

    def __init__(self, unit: Unit, made: Profile, parts_of: PartsOf) -> None:
        """Request gradients for all weights that are matrices, stacks or convolution kernels."""
        self._slots = [slot for slot in unit.slots if slot.tensor.dim() > 1 and not slot.is_buffer]
        self._found: dict[str, dict[Part, Curvature]] = {}
        for slot in self._slots:
            slot.tensor.requires_grad_(True)
            curvatures = {part: Curvature() for part in parts_of(slot.name, tuple(slot.tensor.shape))}
            self._found[slot.name], made.by_part[slot.name] = curvatures, dict(curvatures)

    def settle(self) -> None:
        """Add the gradients of the finished micro-batch; a weight that no output depended on has none."""
        for slot in self._slots:
            gradient, slot.tensor.grad = slot.tensor.grad, None
            if gradient is not None:
                for part, curvature in self._found[slot.name].items():
                    curvature.add(part.of(gradient))


def profile(
    stream: Stream,
    method: Method,
    seen: Callable[[Unit, Profile], None] | None = None,
    parts_of: PartsOf = parts_of_shape,
) -> Profile:
    """Run the model forward and backward, and return the curvature of its matrices.

    ``stream`` must have been started with ``graph``. ``seen`` is called with each unit in the backward pass, while its
    weights are loaded and their curvatures are complete. Errors of an expert without tokens cost nothing.
    """
    tapes: list[list[_Step]] = [[] for _ in stream.batches]
    order: list[Unit] = []
    side = ModelRun(stream)
    for batch in take_turns(stream, side.load, side.free):
        tapes[batch].append(_forward(stream, batch))
        if side.unit not in order[-1:]:
            order.append(side.unit)
    made = Profile()
    for batch in stream.batches:
        made.scored += method.backward(batch, stream.result(batch))
    for unit in reversed(order):
        unit.load(stream.tensors(unit))
        _backward(unit, tapes, _Gradients(unit, made, parts_of))
        for slot in unit.slots:
            for part, curvature in made.by_part.get(slot.name, {}).items():
                curvature.complete(part.of(slot.tensor.detach()))
        if seen is not None:
            seen(unit, made)
        unit.free()
    return made


def _forward(stream: Stream, batch: int) -> _Step:
    unit, args, kwargs = stream.take_call(batch)
    with torch.no_grad():
        output = unit.forward(*args, **kwargs)
    leaves = _map_floats(output, lambda tensor: tensor.detach().requires_grad_())
    with torch.enable_grad():
        stream.resume(batch, _map_floats(leaves, lambda tensor: tensor.clone()))
    return _Step(unit, args, kwargs, leaves)


def _backward(unit: Unit, tapes: Sequence[list[_Step]], gradients: _Gradients) -> None:
    """Run the unit again for each micro-batch, with a graph, and pass the gradients on to the units before it."""
    if not any(
        tensor.requires_grad
        for tape in tapes
        for step in tape
        if step.unit is unit
        for tensor in _list_floats((step.args, step.kwargs))
    ):
        for slot in unit.slots:  # no input needs a gradient, so that backward ends in the weights
            if not slot.is_buffer:
                slot.tensor.requires_grad_(True)
    for tape in tapes:
        for step in [step for step in tape if step.unit is unit][::-1]:
            _step_back(unit, step)
            tape.remove(step)
        gradients.settle()


def _step_back(unit: Unit, step: _Step) -> None:
    inputs = _list_floats((step.args, step.kwargs))
    fresh = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs}

    def renew(tensor: Tensor) -> Tensor:
        return fresh[id(tensor)]

    with torch.enable_grad():
        output = unit.forward(*_map_floats(step.args, renew), **_map_floats(step.kwargs, renew))
    pairs = [
        (made, leaf.grad)
        for made, leaf in zip(_list_floats(output), _list_floats(step.output), strict=True)
        if leaf.grad is not None and made.requires_grad
    ]
    if pairs:
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
    below = [(tensor, fresh[id(tensor)].grad) for tensor in inputs if tensor.requires_grad]
    known = [(tensor, gradient) for tensor, gradient in below if gradient is not None]
    if known:
        torch.autograd.backward([tensor for tensor, _ in known], [gradient for _, gradient in known], retain_graph=True)


def _list_floats(value: object) -> list[Tensor]:
    """Return the floating tensors in arguments or outputs, in their order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _list_floats(item)]
    return [tensor for item in value for tensor in _list_floats(item)] if isinstance(value, tuple | list) else []


def _map_floats(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments or outputs with their floating tensors changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        changed = {key: _map_floats(item, change) for key, item in value.items()}
        return type(value)(**changed) if type(value) is not dict else changed
    if isinstance(value, tuple):
        parts = [_map_floats(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [_map_floats(item, change) for item in value] if isinstance(value, list) else value
