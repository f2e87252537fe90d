"""Scales and zero points in compressed-tensors: one for the weight, or one or more per row."""

from quanterr.errors import FormatMismatch
from quanterr.formats.base import Parts
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.ct_config import read_setting
from quanterr.formats.shared.padding import check_width


def fit_row_blocks(parts: Parts, shape: tuple[int, ...]) -> ColumnBlocks:
    """Return the column blocks of a weight of this shape, derived from its scale and the parts stored with it.

    Raises:
        FormatMismatch: the shape of the scale, zero points or order does not fit.
    """
    scale, zero_point, order = parts["scale"], parts.get("zero_point"), parts.get("order")
    if len(shape) not in (2, 3) or (scale.n != 1 and scale.shape[:-1] != shape[:-1]):
        raise FormatMismatch(
            f"its scale {scale} should be one number, or one or more for each row of a weight of shape {list(shape)}"
        )
    if zero_point is not None and zero_point.shape != scale.shape:
        raise FormatMismatch(f"{zero_point} should have the shape of {scale}")
    if order is not None and order.shape != shape[1:]:
        raise FormatMismatch(f"{order} should have one number for each column of a weight of shape {list(shape)}")
    check_width(parts, shape)
    return fit_blocks(scale.shape[-1] if scale.n > 1 else 1, shape[-1], read_setting(parts, "group_size"), order)
