"""The Gauss-Newton curvature of the output error of recorded calls, by random probes: what errors of weights cost.

A small error e of a weight changes the output y of a call by J e, and u · J e for random signs u (±1) has the mean
square ‖J e‖². Where errors of elements are independent, the output error of the call is

    ‖J e‖² / ‖y‖² ≈ Σ_ij e_ij² G_ij² / ‖y‖²        G = ∂(u · y) / ∂W

The mean over calls is taken, with one probe for each. Correlated errors and higher orders are left out.

Source: Botev, Ritter, Barber, Practical Gauss-Newton Optimisation for Deep Learning (2017), section 2; random signs:
Hutchinson, A stochastic estimator of the trace of the influence matrix (1990).
"""

import torch

from quanterr.evaluation.denoisers.calls import output_of

SEED = 13  # seed of the random probes


class GaussNewton:
    """The error of the output of each call, relative to the output."""

    def __init__(self) -> None:
        """Seed the probes."""
        self._generator = torch.Generator().manual_seed(SEED)

    def backward(self, number: int, result: object) -> int:
        """Compute the gradients of u · y / ‖y‖ for random signs u."""
        output = output_of(result)
        signs = 2 * torch.randint(0, 2, output.shape, generator=self._generator) - 1  # equal on any device
        with torch.enable_grad():
            probed = (output * signs.to(output)).sum() / torch.linalg.vector_norm(output.detach())
            torch.autograd.backward(probed)
        return 1
