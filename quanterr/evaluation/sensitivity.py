"""Which weights matter: the Fisher information of each weight, from one pass back through the model, unit by unit.

At labels that are drawn from the model's own distribution, the divergence that an error e of a weight makes is

    KLD ≈ ½ Σ_t Σ_ij g_ti² x_tj² e_ij² / scored

g_ti: the gradient of output i at token t; x_tj: input j. Of an error that is spread evenly, ‖W‖² · NMSE / n for each of
n elements, that is alpha · NMSE with

    alpha = ½ Σ_t ‖g_t‖² ‖x_t‖² / scored · ‖W‖² / n

The sum has to be over tokens: a model may have one token in a chunk with a huge input and hardly any gradient (massive
activations), and Σ_t ‖g_t‖² · Σ_t ‖x_t‖² / tokens would then be tens of times too large. Where elements are told apart,
each is weighed by G_i A_j, the sums over tokens of g_ti² and x_tj², scaled so that an even error costs what alpha says.
It is a ranking first: as a prediction it holds up to about 0.1 nat.

The forward pass keeps the inputs of each unit; the backward pass loads each unit again, in reverse, and recomputes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.evaluation.states import products_of, storage_of
from quanterr.evaluation.stepping import Stream
from quanterr.evaluation.units import Unit

SEED = 11  # of the labels


@dataclass
class Curvature:
    """What is kept of a weight."""

    inputs: Tensor | None = None  # A (columns,) float64; of an embedding how often each row was read
    gradients: Tensor | None = None  # G (rows,) float64; of an embedding by columns
    products: list[Tensor] = field(default_factory=list)  # ‖g_t‖² ‖x_t‖² of each token; of a table ‖x_t‖ is 1
    transposed: bool = False  # the weight is stored [in, out]
    is_table: bool = False  # an embedding, whose rows are chosen
    energy: float = 0.0  # ‖W‖²
    shape: tuple[int, ...] = ()

    def predicted(self, error: Tensor, scored: int) -> float:
        """The divergence that an error of the weight makes, by prediction [nat]."""
        if self.gradients is None or self.inputs is None or error.dim() != 2:
            return float("nan")
        rows, cols = (
            (self.inputs, self.gradients) if self.is_table or self.transposed else (self.gradients, self.inputs)
        )
        even = float(rows.sum() * cols.sum())
        weighed = float(torch.einsum("ij,i,j->", error.double().square(), rows, cols))
        return 0.5 * self._over_tokens() / scored * weighed / even if even else 0.0

    def alpha(self, scored: int) -> float:
        """KLD ≈ alpha · NMSE of an error that is spread evenly."""
        if self.gradients is None or self.inputs is None:
            return float("nan")
        n = self.inputs.numel() * self.gradients.numel()
        return 0.5 * self._over_tokens() / scored * self.energy / n

    def alpha_se(self, scored: int) -> float:
        """The standard error of alpha over tokens, as if these were independent."""
        values = torch.cat(self.products).double() if self.products else torch.zeros(0)
        if len(values) < 2 or not values.any():
            return float("nan")
        return self.alpha(scored) * sqrt(len(values) * float(values.var())) / float(values.sum())

    def _over_tokens(self) -> float:
        return sum(float(products.sum(dtype=torch.float64)) for products in self.products)


@dataclass
class _Step:
    """A unit that a micro-batch went through."""

    unit: Unit
    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object  # with leaves, whose gradients come from above


@dataclass
class Profile:
    """The curvature of every matrix of a model, by names of the model."""

    scored: int = 0
    found: dict[str, Curvature] = field(default_factory=dict)


def profile(stream: Stream, batches: int, first: int, seen: Callable[[Unit, Profile], None] | None = None) -> Profile:
    """Go through the model and back; ``first`` is the first prediction of a chunk that is scored.

    ``stream`` was started with ``graph``. ``seen`` is called with each unit on the way back, while it is loaded and
    what is known of its weights is complete.
    """
    tapes: list[list[_Step]] = [[] for _ in range(batches)]
    order: list[Unit] = []
    while (unit := stream.next_unit) is not None:
        _forward(stream, unit, tapes)
        order.append(unit)
    made = Profile()
    generator = torch.Generator().manual_seed(SEED)
    for batch in range(batches):
        made.scored += _loss(stream.result(batch).logits, first, generator)
    for unit in reversed(order):
        unit.load(stream.tensors(unit))
        _backward(unit, tapes, made)
        for slot in unit.slots:
            if slot.name in made.found:
                weight = slot.tensor.detach()
                made.found[slot.name].energy = float(weight.double().square().sum())
                made.found[slot.name].shape = tuple(weight.shape)
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


def _loss(logits: Tensor, first: int, generator: torch.Generator) -> int:
    """Gradients of -ln p at labels drawn from the model; how many there are."""
    with torch.enable_grad():
        rows = logits[:, first:-1].flatten(0, 1)
        drawn = torch.multinomial(rows.detach().softmax(-1).cpu(), 1, generator=generator)  # the same on any device
        labels = drawn[:, 0].to(rows.device)
        loss: Any = F.cross_entropy(rows, labels, reduction="sum")
        loss.backward()
    return len(labels)


def _backward(unit: Unit, tapes: Sequence[list[_Step]], made: Profile) -> None:
    """The unit again for each micro-batch, with a graph; gradients go on to what is below it."""
    recorder = _Recorder(unit, made)
    if not any(step.unit is unit and _requiring(step) for tape in tapes for step in tape):
        for slot in unit.slots:  # nothing with a gradient comes in: let it end in the weight
            if not slot.is_buffer:
                slot.tensor.requires_grad_(True)
    for tape in tapes:
        for step in [step for step in tape if step.unit is unit][::-1]:
            _step_back(unit, step, recorder)
            tape.remove(step)


def _step_back(unit: Unit, step: _Step, recorder: "_Recorder") -> None:
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


class _Recorder(TorchFunctionMode):
    """While a unit runs again: squares of the inputs of its weights, and of the gradients of their outputs."""

    def __init__(self, unit: Unit, made: Profile) -> None:
        super().__init__()
        self._made = made
        self._names = {
            storage_of(slot.tensor): slot.name for slot in unit.slots if slot.tensor.dim() == 2 and not slot.is_buffer
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for values, weight, transposed in products_of(function, args):
            name = self._names.get(storage_of(weight))
            if name is not None and isinstance(output, Tensor) and output.requires_grad:
                with torch._C.DisableTorchFunction():
                    self._record(name, values, weight, transposed, output)
        return output

    def _record(self, name: str, values: Tensor, weight: Tensor, transposed: bool, output: Any) -> None:
        curvature = self._made.found.setdefault(name, Curvature())
        curvature.transposed = transposed
        curvature.is_table = not values.is_floating_point()
        if curvature.is_table:
            squares = torch.bincount(values.flatten(), minlength=weight.shape[0]).double()
            norms = torch.ones(values.numel(), device=values.device)
        else:
            flat = values.detach().reshape(-1, values.shape[-1])
            squares = flat.square().sum(0, dtype=torch.float64)
            norms = flat.square().sum(1)
        curvature.inputs = squares if curvature.inputs is None else curvature.inputs + squares

        def add(gradient: Tensor) -> None:
            squares = gradient.detach().reshape(-1, gradient.shape[-1]).square()
            found = squares.sum(0, dtype=torch.float64)
            curvature.products.append(squares.sum(1) * norms)
            curvature.gradients = found if curvature.gradients is None else curvature.gradients + found

        output.register_hook(add)


def _tensors(value: Any) -> list[Tensor]:
    """Floating tensors in arguments or outputs, in their order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple | list) else []


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with its floating tensors changed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        changed = {key: _mapped(item, change) for key, item in value.items()}
        return type(value)(**changed) if type(value) is not dict else changed
    if isinstance(value, tuple):
        parts = [_mapped(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value
