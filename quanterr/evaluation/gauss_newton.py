"""The Gauss-Newton curvature of the output error of recorded calls, by random probes: how much each weight matters.

A small error e of a weight changes the output y of a call by J e, and u · J e for random signs u (±1) has the mean
square ‖J e‖². Where errors of elements are independent, the output error of the call is

    ‖J e‖² / ‖y‖² ≈ Σ_ij e_ij² G_ij² / ‖y‖²        G = ∂(u · y) / ∂W

G is the gradient of a whole call, Σ_t g_t x_tᵀ over tokens t, because all tokens share one error. A sum of g_ti² x_tj²
would miss what tokens have in common, such as modulations. An evenly spread error causes alpha · NMSE with

    alpha = Σ_ij G_ij² / ‖y‖² · ‖W‖² / n

Both are means over calls, with one probe each. Correlated errors and higher orders are left out.

Source: Botev, Ritter, Barber, Practical Gauss-Newton Optimisation for Deep Learning (2017), section 2; random signs:
Hutchinson, A stochastic estimator of the trace of the influence matrix (1990).
"""

from dataclasses import dataclass, field
from math import sqrt
from statistics import stdev
from typing import Any

import torch
from torch import Tensor

from quanterr.evaluation.calls import output_of
from quanterr.evaluation.sensitivity import Curvature, Part, PartsOf, Profile
from quanterr.evaluation.units import Unit

SEED = 13  # of the probes


@dataclass
class ElementCurvature(Curvature):
    """Sums over calls of the squared gradients of a matrix, element by element."""

    squares: Tensor | None = None  # (rows, columns): Σ G² / ‖y‖²
    calls: list[float] = field(default_factory=list)  # of each call: Σ over the elements
    transposed: bool = False
    is_table: bool = False
    energy: float = 0.0
    shape: tuple[int, ...] = ()

    @property
    def is_used(self) -> bool:
        """True if the matrix took part in a call."""
        return bool(self.calls)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of a call."""
        found = gradient.square()
        self.calls.append(float(found.sum(dtype=torch.float64)))
        self.squares = found if self.squares is None else self.squares.add_(found)

    def complete(self, part: Part, weight: Tensor, transposed: bool) -> None:
        """Keep energy and shape."""
        matrix = part.of(weight, transposed)
        self.energy, self.shape = float(matrix.double().square().sum()), tuple(matrix.shape)

    def predicted(self, error: Tensor, scored: int) -> float:
        """Return the predicted output error for an error of the matrix; ``scored`` is the number of calls."""
        if self.squares is None:
            return 0.0
        return float((error.square() * self.squares).sum(dtype=torch.float64)) / scored

    def alpha(self, scored: int) -> float:
        """Return alpha: output error ≈ alpha · NMSE for an evenly spread error."""
        return sum(self.calls) / scored * self.energy / max(torch.Size(self.shape).numel(), 1)

    def alpha_se(self, scored: int) -> float:
        """Return the standard error of alpha over calls and their probes; NaN for fewer than two."""
        if len(self.calls) < 2 or not any(self.calls):
            return float("nan")
        return self.alpha(scored) * sqrt(len(self.calls)) * stdev(self.calls) / sum(self.calls)


class GaussNewton:
    """The error of the output of each call, relative to the output."""

    def __init__(self) -> None:
        """Seed the probes."""
        self._generator = torch.Generator().manual_seed(SEED)

    def backward(self, number: int, result: object) -> int:
        """Compute the gradients of u · y / ‖y‖ for random signs u."""
        output = output_of(result)
        signs = 2 * torch.randint(0, 2, output.shape, generator=self._generator) - 1  # the same on any device
        with torch.enable_grad():
            probed: Any = (output * signs.to(output)).sum() / torch.linalg.vector_norm(output.detach())
            probed.backward()
        return 1

    def record(self, unit: Unit, made: Profile, parts_of: PartsOf) -> "_Gradients":
        """Return a recorder of the gradients of the unit's weights."""
        return _Gradients(unit, made, parts_of)


class _Gradients:
    """Squares the gradients of a unit's weights after each call."""

    def __init__(self, unit: Unit, made: Profile, parts_of: PartsOf) -> None:
        """Request gradients for all weights that are matrices, stacks or convolution kernels."""
        self._slots = [slot for slot in unit.slots if slot.tensor.dim() > 1 and not slot.is_buffer]
        self._found: dict[str, dict[Part, ElementCurvature]] = {}
        for slot in self._slots:
            slot.tensor.requires_grad_(True)
            own = {part: ElementCurvature() for part in parts_of(slot.name, tuple(slot.tensor.shape))}
            self._found[slot.name], made.found[slot.name] = own, dict(own)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def settle(self) -> None:
        """Take the gradients of the finished call; a weight that took no part has none."""
        for slot in self._slots:
            gradient, slot.tensor.grad = slot.tensor.grad, None
            if gradient is not None:
                for part, curvature in self._found[slot.name].items():
                    curvature.add(part.of(gradient, transposed=False))
