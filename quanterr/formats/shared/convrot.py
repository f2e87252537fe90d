"""Rotated columns, as labels declare them: kernel/rotation.py."""

from msgspec.structs import replace

from quanterr.checkpoints.labels import Label
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder
from quanterr.formats.shared.padding import Padded, read_padded
from quanterr.kernel import rotation
from quanterr.kernel.rotation import is_power_of_four
from quanterr.lazy_torch import Tensor
from quanterr.tensors.workspace import Workspace

DEFAULT_GROUP = 256


def find_group_size(label: Label | None, cols: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of columns in a group, from the label or else 256, and warnings about the size.

    Raises:
        FormatMismatch: no matrix of this size exists, or the size does not divide a row.
    """
    size = (label and label.number("convrot_groupsize")) or DEFAULT_GROUP
    if size & (size - 1) or size < 2 or cols % size:
        source_says = (
            f"{label.source} declares its columns rotated" if label else "its columns are rotated, without a label,"
        )
        raise FormatMismatch(
            f"{source_says} in groups of {size}, which is not a power of two that divides {cols} columns"
        )
    if is_power_of_four(size):
        return size, ()
    return size, (f"rotated in groups of {size}, which ComfyUI cannot load; read as rotated by Sylvester's matrix",)


def read_rotated(decoder: Decoder, padded: Padded) -> Decoder:
    """Return a decoder that cuts the weight from a stored matrix and undoes the rotation of its columns."""
    return read_padded(padded, replace(decoder, rotation=padded.step))


def rotate(size: int, values: Tensor, _workspace: Workspace) -> Tensor:
    """Rotate whole rows, (r, c) float32, in place as the quantizer did: the matrix is its own inverse."""
    return rotation.rotate(values, size)
