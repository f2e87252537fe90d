"""The Fisher information of each weight of a language model: how much it matters to the predicted tokens.

With labels drawn from the model's own distribution, an error e of a weight causes the divergence

    KLD ≈ ½ Σ_t Σ_ij g_ti² x_tj² e_ij² / scored

g_ti is the gradient of output i at token t, x_tj input j. For an evenly spread error, ‖W‖² · NMSE / n in each of n
elements, this is alpha · NMSE with

    alpha = ½ Σ_t ‖g_t‖² ‖x_t‖² / scored · ‖W‖² / n

The sum must be over tokens: a chunk may have one token with a huge input and hardly any gradient (massive activations),
and Σ_t ‖g_t‖² · Σ_t ‖x_t‖² / tokens would then be tens of times too large. The prediction for a given error weighs each
element by G_i A_j, the sums over tokens of g_ti² and x_tj², scaled so that an even error costs what alpha says. It
ranks weights; as a prediction it holds up to about 0.1 nat.

Each expert of a stack has its own numbers, over the tokens that were routed to it; so has each stored matrix that the
model joins with others.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.evaluation.sensitivity import Curvature, Part, PartsOf, Profile, Recorder
from quanterr.evaluation.states import products_of, stacked_products_of, storage_of
from quanterr.evaluation.units import Unit

SEED = 11  # of the labels


@dataclass
class FisherCurvature(Curvature):
    """Sums over tokens for one matrix."""

    inputs: Tensor | None = None  # A (columns,) float64; of an embedding how often each row was read
    gradients: Tensor | None = None  # G (rows,) float64; of an embedding by columns
    products: list[Tensor] = field(default_factory=list)  # ‖g_t‖² ‖x_t‖² of each token; ‖x_t‖ is 1 for a table
    transposed: bool = False  # the weight is stored [in, out]
    is_table: bool = False  # an embedding, whose rows are chosen
    energy: float = 0.0  # ‖W‖²
    shape: tuple[int, ...] = ()

    @property
    def is_used(self) -> bool:
        """True if the matrix took part in the model's forward."""
        return bool(self.products)

    def complete(self, part: Part, weight: Tensor, transposed: bool) -> None:
        """Keep energy and shape; an expert without tokens costs nothing."""
        matrix = part.of(weight, transposed or self.is_table)
        self.energy, self.shape = float(matrix.double().square().sum()), tuple(matrix.shape)
        if self.gradients is None and part.expert is not None:
            self.transposed = transposed
            outputs, inputs = matrix.shape[::-1] if transposed else matrix.shape
            self.inputs = torch.zeros(inputs, dtype=torch.float64, device=weight.device)
            self.gradients = torch.zeros(outputs, dtype=torch.float64, device=weight.device)

    def predicted(self, error: Tensor, scored: int) -> float:
        """Return the predicted divergence for an error of the weight [nat]; NaN if unknown."""
        if self.gradients is None or self.inputs is None or error.dim() != 2:
            return float("nan")
        rows, cols = (
            (self.inputs, self.gradients) if self.is_table or self.transposed else (self.gradients, self.inputs)
        )
        even = float(rows.sum() * cols.sum())
        weighed = float(torch.einsum("ij,i,j->", error.double().square(), rows, cols))
        return 0.5 * self._over_tokens() / scored * weighed / even if even else 0.0

    def alpha(self, scored: int) -> float:
        """Return alpha [nat]: KLD ≈ alpha · NMSE for an evenly spread error; NaN if unknown."""
        if self.gradients is None or self.inputs is None:
            return float("nan")
        n = self.inputs.numel() * self.gradients.numel()
        return 0.5 * self._over_tokens() / scored * self.energy / n

    def alpha_se(self, scored: int) -> float:
        """Return the standard error of alpha over tokens, assumed independent; NaN for fewer than two."""
        values = torch.cat(self.products).double() if self.products else torch.zeros(0)
        if len(values) < 2 or not values.any():
            return float("nan")
        return self.alpha(scored) * sqrt(len(values) * float(values.var())) / float(values.sum())

    def _over_tokens(self) -> float:
        return sum(float(products.sum(dtype=torch.float64)) for products in self.products)


class Fisher:
    """The divergence of the predictions from position ``first`` of each chunk on, with labels drawn from the model."""

    def __init__(self, first: int) -> None:
        """Seed the labels."""
        self._first, self._generator = first, torch.Generator().manual_seed(SEED)

    def backward(self, number: int, result: Any) -> int:
        """Compute the gradients of -ln p of labels drawn from the model; return the number of labels."""
        with torch.enable_grad():
            rows = result.logits[:, self._first : -1].flatten(0, 1)
            drawn = torch.multinomial(rows.detach().softmax(-1).cpu(), 1, generator=self._generator)  # on any device
            labels = drawn[:, 0].to(rows.device)
            loss: Any = F.cross_entropy(rows, labels, reduction="sum")
            loss.backward()
        return len(labels)

    def record(self, unit: Unit, made: Profile, parts_of: PartsOf) -> Recorder:
        """Return a recorder of the unit's products."""
        return _Products(unit, made, parts_of)


class _Products(TorchFunctionMode):
    """Adds up squares of the inputs of weights, and of the gradients of their outputs, while a unit runs again."""

    def __init__(self, unit: Unit, made: Profile, parts_of: PartsOf) -> None:
        super().__init__()
        self._made, self._parts_of = made, parts_of
        self._found: dict[str, dict[Part, FisherCurvature]] = {}
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

    def settle(self) -> None:
        """Do nothing: hooks collect the gradients of outputs."""

    def _record(self, values: Tensor, weight: Tensor, transposed: bool, output: Any, expert: int | None = None) -> None:
        """Add up a product with a watched weight; ``expert`` is its place in an output that is a stack."""
        slot = self._slots.get(storage_of(weight))
        if slot is None:
            return
        name, whole = slot
        found = self._found.get(name)
        if found is None:
            found = {part: FisherCurvature() for part in self._parts_of(name, tuple(whole.shape))}
            self._found[name], self._made.found[name] = found, dict(found)
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
