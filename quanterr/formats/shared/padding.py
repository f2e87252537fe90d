"""Weights stored with padding, in longer rows or taller experts.

    stored    (rows rounded up, cols rounded up), or (experts, rows rounded up, cols rounded up)
    weight    its first rows and columns; the rest is padding

The true shape is the original's; the label's orig_shape must agree. Without either, the stored shape is the weight's.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, Parts
from quanterr.tensors.chunks import KERNEL_WIDTH, as_matrix


@dataclass(frozen=True, slots=True)
class Padded:
    """The place of a weight of shape ``shape`` in a stored matrix; blocks of columns begin at multiples of ``step``."""

    shape: tuple[int, ...]
    rows: int  # rows of one expert
    cols: int
    stored_rows: int
    stored_cols: int
    step: int


def read_padded(padded: Padded, decoder: Decoder) -> Decoder:
    """Return the decoder of the weight in a stored matrix, which another decoder describes."""
    return replace(decoder, rows=padded.rows, stored_rows=padded.stored_rows)


def fit_unpadded(parts: Parts, shape: tuple[int, ...], step: int) -> Padded:
    """Return the place of a weight of this shape, (rows, cols) or (experts, rows, cols), stored without padding.

    Raises:
        FormatMismatch: experts are so narrow that they could be the kernels of a convolution.
    """
    check_width(parts, shape)
    return Padded(shape, shape[-2], shape[-1], shape[-2], shape[-1], step)


def check_width(parts: Parts, shape: tuple[int, ...]) -> None:
    """Check that a weight of this shape has rows, which are not the kernels of a convolution.

    Raises:
        FormatMismatch: there are no rows, or experts are so narrow that they could be such kernels.
    """
    if len(shape) < 2:
        raise FormatMismatch(f"{parts.codes} should have rows and columns")
    if as_matrix(shape)[1] != shape[-1]:
        raise FormatMismatch(f"{parts.codes}: experts with fewer than {KERNEL_WIDTH} columns are not supported")


def fit_padded(parts: Parts, stored: tuple[int, ...], step: int, multiple: int | None = None) -> Padded:
    """Return the place of the weight in ``stored`` elements, (rows, cols) or (experts, rows, cols).

    Rows and columns are padded to multiples of ``multiple`` (default: ``step``) or not at all. If the original's shape
    fits neither, a mismatch is reported later.

    Raises:
        FormatMismatch: :func:`fit_unpadded` raises it, or the label's orig_shape is not the original's shape.
    """
    as_stored = fit_unpadded(parts, stored, step)
    multiple = multiple or step
    labelled = read_labelled_shape(parts)
    shape = parts.hints.shape or labelled or stored
    if labelled and labelled != shape:
        raise FormatMismatch(f"the label's orig_shape is {list(labelled)}, the original's shape {list(shape)}")
    if len(shape) != len(stored) or shape[:-2] != stored[:-2] or 0 in shape:
        return as_stored
    if any(have not in (n, -(-n // multiple) * multiple) for n, have in zip(shape[-2:], stored[-2:], strict=True)):
        return as_stored
    check_width(parts, shape)
    return Padded(shape, shape[-2], shape[-1], stored[-2], stored[-1], step)


def check_unpadded(parts: Parts) -> None:
    """Check the label's orig_shape against codes that are stored without padding.

    Raises:
        FormatMismatch: orig_shape differs from the codes' shape; the message names both.
    """
    labelled = read_labelled_shape(parts) if parts.hints.labels else None
    if labelled and labelled != parts.codes.shape:
        raise FormatMismatch(f"the label's orig_shape is {list(labelled)}, but the codes are {parts.codes}")


def read_labelled_shape(parts: Parts) -> tuple[int, ...] | None:
    """Return the shape of the original that a label declares; None if no label does."""
    for label in parts.hints.labels:
        sizes = label.fields.get("orig_shape")
        if isinstance(sizes, list) and sizes and all(isinstance(n, int) for n in sizes):
            return tuple(sizes)
    return None
