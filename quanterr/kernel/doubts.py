"""The codes that a closer look may find not to be the nearest: by the compiled kernel, which rules out all others."""

import ctypes
from functools import lru_cache

from quanterr.kernel.levels import Levels, Scaling
from quanterr.kernel.library import Kernel
from quanterr.kernel.structs import DoubtsStruct
from quanterr.lazy_torch import Tensor, torch


def list_doubtful(
    kernel: Kernel, levels: Levels, x: Tensor, y: Tensor, scales: Scaling, margin: float, absolute: float, out: Tensor
) -> Tensor:
    """Return the places, (n,) int64, of elements that are not clearly nearest to their own level, in order.

    ``x`` and the stored values ``y``, (r, c) float32, are contiguous. For every other element, any other level is
    farther away by more than twice ``margin`` · (|x| + |offset| + half of the range of codes with an offset), plus
    ``absolute`` of that divided by the scale. ``out`` has room for r · c places.
    """
    unit, shift = scales
    doubts = DoubtsStruct(unit=unit.data_ptr(), margin=margin, absolute=absolute)
    doubts.unit_row, doubts.unit_col = _find_steps(unit)
    if shift is not None:
        doubts.shift, doubts.half_range = shift.data_ptr(), (levels.highest - levels.lowest) / 2
        doubts.shift_row, doubts.shift_col = _find_steps(shift)
    if levels.table:
        values, bounds, rooms = _find_rooms(levels.table)
        doubts.n_bounds, doubts.bounds = len(bounds), bounds.data_ptr()
        doubts.levels, doubts.rooms = values.data_ptr(), rooms.data_ptr()
    elif levels.mantissa:
        doubts.normal, doubts.half_step = levels.normal, 2.0 ** -(levels.mantissa + 1)
    n = kernel.library.quanterr_list_doubtful(
        ctypes.byref(doubts), x.data_ptr(), y.data_ptr(), *x.shape, out.data_ptr()
    )
    return out[:n]


def _find_steps(numbers: Tensor) -> tuple[int, int]:
    """Return the elements from one row to the next, and from one column to the next; 0 where all share one."""
    rows, cols = numbers.shape
    return numbers.stride(0) if rows > 1 else 0, numbers.stride(1) if cols > 1 else 0


@lru_cache(maxsize=16)  # cached, as many weights have the same levels; the kernel reads the cached tensors
def _find_rooms(table: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the levels of a table, the bounds between them, and half the distance of each to the nearest other one."""
    values, far = torch.tensor(table), torch.full((1,), torch.inf)
    half = values.diff() / 2
    return values, values[:-1] + half, torch.minimum(torch.cat([half, far]), torch.cat([far, half]))
