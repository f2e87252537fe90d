"""Ways in which a part of a weight is not what the original has: what a quantizer, a merge or a copy went wrong in.

Each changes the original, (rows, cols) or more axes, so that the stored weight is wrong in the same places.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64  # columns that share a scale
Change = Callable[[Tensor, torch.Generator], Tensor]


class Damage(NamedTuple):
    """One kind of damage."""

    name: str
    change: Change


def others(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers of another weight, of the same sizes in the same rows."""
    matrix = x.reshape(x.shape[0], -1)
    return matrix[:, torch.randperm(matrix.shape[1], generator=generator)].reshape(x.shape)


def columns(x: Tensor, generator: torch.Generator) -> Tensor:
    """Replace the last columns by another weight's."""
    n = max(x.shape[-1] // 32, 1)
    x[..., -n:] = others(x, generator)[..., -n:]
    return x


def column_sign(x: Tensor, generator: torch.Generator) -> Tensor:
    """Change the sign of one column."""
    x[..., x.shape[-1] // 3] *= -1
    return x


def corner(x: Tensor, generator: torch.Generator) -> Tensor:
    """Replace a corner of an eighth of the rows and columns by another weight's."""
    rows, cols = max(x.shape[-2] // 8, 1), max(x.shape[-1] // 8, 1)
    x[..., -rows:, -cols:] = others(x, generator)[..., -rows:, -cols:]
    return x


def block(x: Tensor, generator: torch.Generator) -> Tensor:
    """Enlarge a block in the middle by a fifth."""
    row, col = x.shape[-2] // 2, x.shape[-1] // 2
    x[..., row : row + max(x.shape[-2] // 4, 1), col : col + max(x.shape[-1] // 4, 1)] /= 1.2
    return x


def one_row_scale(x: Tensor, generator: torch.Generator) -> Tensor:
    """Store one row 1.15 times too large."""
    x[..., x.shape[-2] // 2, :] /= 1.15
    return x


def one_group_scale(x: Tensor, generator: torch.Generator) -> Tensor:
    """Store 64 columns of a row 1.15 times too large."""
    x[..., x.shape[-2] // 3, : min(GROUP, x.shape[-1])] /= 1.15
    return x


def row_zero(x: Tensor, generator: torch.Generator) -> Tensor:
    """Clear a row of the original; the stored weight still has it."""
    x[..., x.shape[-2] // 2, :] = 0
    return x


def beyond(x: Tensor, generator: torch.Generator) -> Tensor:
    """Double the original's largest elements, so that the stored weight seems to clip them."""
    matrix = x.reshape(x.shape[0], -1)
    limit = matrix.abs().amax(1, keepdim=True) * 0.97
    return torch.where(matrix.abs() > limit, 2 * matrix, matrix).reshape(x.shape)


def signs(x: Tensor, generator: torch.Generator) -> Tensor:
    """Change the sign of one element of a hundred."""
    return torch.where(torch.rand(x.shape, generator=generator) < 0.01, -x, x)


def noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise at 20 dB."""
    return x + torch.randn(x.shape, generator=generator) * x.square().mean().sqrt() / 10


def other_step(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return another step of the training: each element changed by a tenth."""
    return x * (1 + 0.1 * torch.randn(x.shape, generator=generator))


def half_of_another_step(x: Tensor, generator: torch.Generator) -> Tensor:
    """Replace the second half of the rows by those of another step."""
    half = x.shape[0] // 2
    x[half:] = other_step(x[half:], generator)
    return x


def other_merge(x: Tensor, generator: torch.Generator) -> Tensor:
    """Merge a twentieth of another model."""
    return 0.95 * x + 0.05 * others(x, generator).flip(0)


def correlate(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return another expert, whose correlation with this one is 0.9."""
    return 0.9 * x + 0.19**0.5 * others(x, generator)


DAMAGES = (
    Damage("columns of another", columns),
    Damage("sign of a column", column_sign),
    Damage("corner of another", corner),
    Damage("block × 1.2", block),
    Damage("one row × 1.15", one_row_scale),
    Damage("one group × 1.15", one_group_scale),
    Damage("row that was zero", row_zero),
    Damage("large values clipped", beyond),
    Damage("1 % of the signs", signs),
    Damage("noise of 20 dB", noise),
    Damage("another step", other_step),
    Damage("half of another step", half_of_another_step),
    Damage("another merge", other_merge),
    Damage("correlated expert", correlate),
)
