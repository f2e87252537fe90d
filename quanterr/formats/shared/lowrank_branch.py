"""Weights stored as codes plus a product of two thin matrices (SVDQuant, SDNQ).

    residual    (rows, cols)    the codes' values
    smooth      (cols,)         the layer divides its input by it; not in SDNQ
    up, down    (rows, rank), (rank, cols)

    weight = residual / smooth + up @ down        if down is already divided by smooth
    weight = (residual + up @ down) / smooth      otherwise

The sum is computed in float64 and rounded to float32 once.

Reference: mit-han-lab/nunchaku (SVDQuant, arXiv 2411.05007); Comfy-Org/comfy-kitchen@7d86acf tensor/svdquant_w4a4.py,
whose weight is the output of its kernel for an identity matrix.
"""

from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace


def add_branch(
    residual: Tensor, smooth: Tensor | None, up: Tensor, down: Tensor, smoothed: bool, workspace: Workspace
) -> Tensor:
    """Turn ``residual``, (r, c), into the weight in place: ``smooth`` is (c,), ``up`` (r, n), ``down`` (n, c).

    ``smoothed`` means that the product is divided by ``smooth`` too.
    """
    wide = workspace.buffer("branch", tuple(residual.shape), torch.float64).copy_(residual)
    if smooth is not None and not smoothed:
        wide.div_(smooth.double())
    wide.addmm_(up.double(), down.double())
    if smooth is not None and smoothed:
        wide.div_(smooth.double())
    return residual.copy_(wide)
