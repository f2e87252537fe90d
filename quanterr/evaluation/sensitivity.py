"""The Fisher information of each weight, from one pass back through the model, unit by unit: how much it matters.

At labels that are drawn from the model's own distribution, the divergence that an error e of a weight makes is

    KLD ≈ ½ Σ_t Σ_ij g_ti² x_tj² e_ij² / scored

g_ti: the gradient of output i at token t; x_tj: input j. Of an error that is spread evenly, ‖W‖² · NMSE / n for each of
n elements, that is alpha · NMSE with

    alpha = ½ Σ_t ‖g_t‖² ‖x_t‖² / scored · ‖W‖² / n

The sum has to be over tokens: a model may have one token in a chunk with a huge input and hardly any gradient (massive
activations), and Σ_t ‖g_t‖² · Σ_t ‖x_t‖² / tokens would then be tens of times too large. A prediction for one error
weighs each element by G_i A_j, the sums over tokens of g_ti² and x_tj², scaled so that an even error costs what alpha
says. It is a ranking first: as a prediction it holds up to about 0.1 nat.

A stack of experts has such numbers for each expert, over the tokens that were sent to it; so has each stored matrix
where the model joins several.

The forward pass keeps the inputs of each unit; the backward pass loads each unit again, in reverse, and recomputes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.evaluation.states import products_of, stacked_products_of, storage_of
from quanterr.evaluation.stepping import Stream
from quanterr.evaluation.units import Unit

SEED = 11  # of the labels


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
    """Return the experts of a stack; of a matrix all of it."""
    return [WHOLE] if len(shape) == 2 else [Part(expert) for expert in range(shape[0])]


@dataclass
class Curvature:
    """The sums that are kept of a matrix."""

    inputs: Tensor | None = None  # A (columns,) float64; of an embedding how often each row was read
    gradients: Tensor | None = None  # G (rows,) float64; of an embedding by columns
    products: list[Tensor] = field(default_factory=list)  # ‖g_t‖² ‖x_t‖² of each token; of a table ‖x_t‖ is 1
    transposed: bool = False  # the weight is stored [in, out]
    is_table: bool = False  # an embedding, whose rows are chosen
    energy: float = 0.0  # ‖W‖²
    shape: tuple[int, ...] = ()

    def predicted(self, error: Tensor, scored: int) -> float:
        """Return the divergence that an error of the weight makes, by prediction [nat]; NaN where nothing is known."""
        if self.gradients is None or self.inputs is None or error.dim() != 2:
            return float("nan")
        rows, cols = (
            (self.inputs, self.gradients) if self.is_table or self.transposed else (self.gradients, self.inputs)
        )
        even = float(rows.sum() * cols.sum())
        weighed = float(torch.einsum("ij,i,j->", error.double().square(), rows, cols))
        return 0.5 * self._over_tokens() / scored * weighed / even if even else 0.0

    def alpha(self, scored: int) -> float:
        """Return alpha [nat]: KLD ≈ alpha · NMSE of an error that is spread evenly; NaN where nothing is known."""
        if self.gradients is None or self.inputs is None:
            return float("nan")
        n = self.inputs.numel() * self.gradients.numel()
        return 0.5 * self._over_tokens() / scored * self.energy / n

    def alpha_se(self, scored: int) -> float:
        """Return the standard error of alpha over tokens, as if these were independent; NaN of fewer than two."""
        values = torch.cat(self.products).double() if self.products else torch.zeros(0)
        if len(values) < 2 or not values.any():
            return float("nan")
        return self.alpha(scored) * sqrt(len(values) * float(values.var())) / float(values.sum())

    def _over_tokens(self) -> float:
        return sum(float(products.sum(dtype=torch.float64)) for products in self.products)


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


def profile(
    stream: Stream,
    batches: int,
    first: int,
    seen: Callable[[Unit, Profile], None] | None = None,
    parts_of: PartsOf = parts_of_shape,
) -> Profile:
    """Go through the model and back; ``first`` is the first prediction of a chunk that is scored.

    ``stream`` was started with ``graph``. ``seen`` is called with each unit on the way back, while its weights are
    loaded and their curvatures are complete. An expert that no token was sent to costs nothing.
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
        _backward(unit, tapes, made, parts_of)
        for slot in unit.slots:
            if slot.name in made.found:
                _complete(made.found[slot.name], slot.tensor.detach())
        if seen is not None:
            seen(unit, made)
        unit.free()
    return made


def _complete(parts: Mapping[Part, Curvature], weight: Tensor) -> None:
    """Add to the curvatures of a parameter what the parameter itself says; of unused experts all of it."""
    turned = any(curvature.transposed for curvature in parts.values())
    for part, curvature in parts.items():
        matrix = part.of(weight, turned or curvature.is_table)
        curvature.energy, curvature.shape = float(matrix.double().square().sum()), tuple(matrix.shape)
        if curvature.gradients is None and part.expert is not None:
            curvature.transposed = turned
            outputs, inputs = matrix.shape[::-1] if turned else matrix.shape
            curvature.inputs = torch.zeros(inputs, dtype=torch.float64, device=weight.device)
            curvature.gradients = torch.zeros(outputs, dtype=torch.float64, device=weight.device)


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
    """Compute the gradients of -ln p at labels drawn from the model; return how many labels there are."""
    with torch.enable_grad():
        rows = logits[:, first:-1].flatten(0, 1)
        drawn = torch.multinomial(rows.detach().softmax(-1).cpu(), 1, generator=generator)  # the same on any device
        labels = drawn[:, 0].to(rows.device)
        loss: Any = F.cross_entropy(rows, labels, reduction="sum")
        loss.backward()
    return len(labels)


def _backward(unit: Unit, tapes: Sequence[list[_Step]], made: Profile, parts_of: PartsOf) -> None:
    """Run the unit again for each micro-batch, with a graph; gradients go on to what is below it."""
    recorder = _Recorder(unit, made, parts_of)
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
    """Adds up squares of the inputs of weights, and of the gradients of their outputs, while a unit runs again."""

    def __init__(self, unit: Unit, made: Profile, parts_of: PartsOf) -> None:
        super().__init__()
        self._made, self._parts_of = made, parts_of
        self._slots = {
            storage_of(slot.tensor): (slot.name, slot.tensor)
            for slot in unit.slots
            if slot.tensor.dim() in (2, 3) and not slot.is_buffer
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        with torch._C.DisableTorchFunction():
            for values, weight, transposed in products_of(function, args):
                self._record(values, weight, transposed, output)
            for values, stack in stacked_products_of(function, args):
                for expert, matrix in enumerate(stack):
                    self._record(values[expert], matrix, True, output, expert)
        return output

    def _record(self, values: Tensor, weight: Tensor, transposed: bool, output: Any, expert: int | None = None) -> None:
        """Add up a product with a watched weight; ``expert`` is its place in an output that is a stack."""
        slot = self._slots.get(storage_of(weight))
        if slot is None:
            return
        name, whole = slot
        found = self._made.found.get(name)
        if found is None:
            found = {part: Curvature() for part in self._parts_of(name, tuple(whole.shape))}
            self._made.found[name] = found
        number = None
        if whole.dim() == 3:
            number = (weight.storage_offset() - whole.storage_offset()) // (whole.shape[1] * whole.shape[2])
        own = {part: curvature for part, curvature in found.items() if part.expert == number}
        is_table = not values.is_floating_point()
        if is_table:
            squares = torch.bincount(values.flatten(), minlength=weight.shape[0]).double()
            norms = torch.ones(values.numel(), device=values.device)
        else:
            flat = values.detach().reshape(-1, values.shape[-1])
            squares = flat.square().sum(0, dtype=torch.float64)
            norms = flat.square().sum(1)
        for curvature in own.values():
            curvature.transposed, curvature.is_table = transposed, is_table
            curvature.inputs = squares if curvature.inputs is None else curvature.inputs + squares

        def add(gradient: Tensor) -> None:
            gradient = gradient if expert is None else gradient[expert]
            squares = gradient.detach().reshape(-1, gradient.shape[-1]).square()
            for part, curvature in own.items():
                outputs = squares[:, part.first : part.stop]
                found = outputs.sum(0, dtype=torch.float64)
                curvature.products.append(outputs.sum(1) * norms)
                curvature.gradients = found if curvature.gradients is None else curvature.gradients + found

        output.register_hook(add)


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
