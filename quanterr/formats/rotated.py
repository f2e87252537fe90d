"""Columns that were rotated before they were quantized, group by group, by a Hadamard matrix.

    stored[:, group] = W[:, group] @ H        H symmetric and orthogonal, so its own inverse
    W[:, group] = stored[:, group] @ H

    size a power of 4        H = kron(H4, …, H4) / sqrt(size), H4 = [[1, 1, 1, -1], [1, 1, -1, 1],
                             [1, -1, 1, 1], [-1, 1, 1, 1]] (ConvRot)
    another power of two     Sylvester: kron([[1, 1], [1, -1]], …) / sqrt(size)

Added up in float64 and rounded to float32 once.

Reference: Comfy-Org/comfy-kitchen comfy_kitchen/tensor/int8_utils.py; silveroxides/convert_to_quant
utils/convrot.py.
"""

from functools import cache
from math import sqrt

import torch
from torch import Tensor

from quanterr.errors import Misfit
from quanterr.labels import Label
from quanterr.tensors import Workspace

DEFAULT_GROUP = 256
H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
H2 = ((1, 1), (1, -1))


def is_power_of_four(size: int) -> bool:
    """Whether the ConvRot matrix of that size exists."""
    return size > 1 and size & (size - 1) == 0 and size.bit_length() % 2 == 1


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """The normalized matrix, (size, size) float64; size is a power of two."""
    small = torch.tensor(H4 if is_power_of_four(size) else H2, dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, small)
    return (matrix / sqrt(size)).to(device)


def group_size(label: Label | None, cols: int) -> tuple[int, tuple[str, ...]]:
    """Columns of a group, as the label says or else 256, and what is odd about it.

    Raises:
        Misfit: no matrix of that size, or it does not divide a row.
    """
    size = (label and label.number("convrot_groupsize")) or DEFAULT_GROUP
    if size & (size - 1) or size < 2 or cols % size:
        says = f"{label.source} says rotated" if label else "rotated, without a label,"
        raise Misfit(f"{says} in groups of {size}, which must be a power of two and divide {cols}")
    if is_power_of_four(size):
        return size, ()
    return size, (f"rotated in groups of {size}, which ComfyUI does not load: undone by a Sylvester matrix",)


def unrotate(values: Tensor, size: int, workspace: Workspace) -> Tensor:
    """``values``, (r, c) with c a multiple of ``size``, with their rotation undone: (r, c) float32, in place."""
    groups = (values.numel() // size, size)
    wide = workspace.buffer("rotated", groups, torch.float64).copy_(values.view(groups))
    back = torch.matmul(wide, hadamard(size, values.device), out=workspace.buffer("back", groups, torch.float64))
    return values.view(groups).copy_(back).view(values.shape)
