"""The nearest codes of given values, and the size of rounding errors; this specifies what the kernel computes."""

from typing import NamedTuple

from quanterr.kernel.levels import FLOAT32_EXPONENT, Levels, Scaling
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace

# Maximum rounding error in steps, with a margin for float32, in which 127 steps are accurate to 2e-5.
HALF_STEP = 0.5001


class Nearest(NamedTuple):
    """The levels nearest to the elements of a chunk, (r, c) each."""

    values: Tensor  # float32: the nearest value that a code can stand for
    steps: Tensor  # distance between the stored and the nearest value, in levels
    outside: Tensor  # bool: beyond the first or the last level by more than half a step


def find_nearest(levels: Levels, x: Tensor, y: Tensor, scales: Scaling) -> Nearest:
    """Find the levels nearest to ``x``; ``y`` is the stored value; both are (r, c) float32.

    If ``y`` is equally near, ``y`` itself is returned, however the format rounds.
    """
    unit, shift = scales
    fixed = unit == 0  # a code has no effect if its scale is zero or the element has no code
    inverse = unit.reciprocal().masked_fill_(fixed, 0.0)
    codes, stored = x - shift if shift is not None else x, y - shift if shift is not None else y
    outside = fixed & (codes != 0)
    codes, stored = codes * inverse, stored * inverse
    values, steps = levels.count_steps(codes, stored)
    values = values * unit
    if shift is not None:
        values.add_(shift)
    below, above = levels.ends
    outside |= (codes < below) | (codes > above)
    kept = (steps == 0) | ((y - x).abs() < (values - x).abs())
    return Nearest(torch.where(kept, y, values), steps, outside)


def accept_stored(y: Tensor) -> Nearest:
    """Return the stored values, (r, c), as the nearest ones, for rows in which no error exceeds half a step."""
    return Nearest(y, torch.zeros_like(y), torch.zeros_like(y, dtype=torch.bool))


def measure_rounding(levels: Levels, x: Tensor, e: Tensor, scales: Scaling, workspace: Workspace) -> float | None:
    """Return the mean square error in steps if each element has the nearest code; None if that is uncertain.

    Uniform errors give 1/12. ``e`` is the error of ``x``, (r, c) float32 each. This is cheaper than
    :func:`find_nearest`.
    """
    unit, shift = scales
    shape = tuple(x.shape)
    if levels.table or (levels.mantissa and shift is not None):
        return None
    inverse = unit.reciprocal()
    errors = torch.mul(e, inverse, out=workspace.buffer("errors", shape, torch.float32))
    steps = 1.0  # steps per unit of ``errors``
    if levels.mantissa:  # each element has its own step, a power of two
        codes = torch.mul(x, inverse, out=workspace.buffer("codes", shape, torch.float32))
        powers = codes.view(torch.int32).bitwise_and_(FLOAT32_EXPONENT).view(torch.float32).clamp_(min=levels.normal)
        errors.div_(powers)
        steps = 2.0**levels.mantissa
    errors = errors.view(-1)
    farthest = max(-float(errors.amin()), float(errors.amax()))
    return float(torch.dot(errors, errors)) * steps**2 / errors.numel() if farthest * steps <= HALF_STEP else None
