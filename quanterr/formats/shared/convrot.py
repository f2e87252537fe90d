"""Rotation of columns by a Hadamard matrix, group by group, which quantizers apply before rounding.

    stored[:, group] = W[:, group] @ H        H symmetric and orthogonal, so its own inverse
    W[:, group] = stored[:, group] @ H

    size a power of 4        H = kron(H4, …, H4) / sqrt(size), H4 = [[1, 1, 1, -1], [1, 1, -1, 1],
                             [1, -1, 1, 1], [-1, 1, 1, 1]] (ConvRot)
    another power of two     Sylvester: kron([[1, 1], [1, -1]], …) / sqrt(size)

Products are computed in float64 and rounded to float32 once. The compiled kernel does the same operations in the same
order.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/int8_utils.py; silveroxides/convert_to_quant@1.3.4
utils/convrot.py.
"""

from functools import partial
from math import sqrt

from msgspec.structs import replace

from quanterr.checkpoints.labels import Label
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, Dequantize, Native, Values
from quanterr.formats.shared.padding import Padded
from quanterr.kernel.decoder import MOST_ROTATED
from quanterr.kernel.interpreter import interpret
from quanterr.kernel.library import choose_kernel
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

DEFAULT_GROUP = 256


def is_power_of_four(size: int) -> bool:
    """Return whether ``size`` is a power of four, so that a ConvRot matrix of that size exists."""
    return size > 1 and size & (size - 1) == 0 and size.bit_length() % 2 == 1


def group_size(label: Label | None, cols: int) -> tuple[int, tuple[str, ...]]:
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
    return size, (f"rotated in groups of {size}, which ComfyUI does not load: a Sylvester matrix undoes it",)


def read_rotated(decoder: Decoder, padded: Padded) -> Dequantize:
    """Return the function that decodes the weight in a stored matrix and undoes the rotation of its columns."""

    def block(chunk: Chunk, workspace: Workspace) -> Values:
        found = interpret(decoder, chunk, workspace)
        return found._replace(weight=unrotate(found.weight, padded.step, workspace))

    dequantize = partial(padded.dequantize, block=block)
    if padded.step > MOST_ROTATED or padded.shape[-2:] != (padded.stored_rows, padded.stored_cols):
        return dequantize
    return Native(replace(decoder, rotation=padded.step), dequantize)


def rotate(size: int, values: Tensor, workspace: Workspace) -> Tensor:
    """Rotate whole rows, (r, c) float32, in place as the quantizer did: the matrix is its own inverse."""
    return unrotate(values, size, workspace)


def unrotate(values: Tensor, size: int, workspace: Workspace) -> Tensor:
    """Undo the rotation of ``values``, (r, c) float32 with c a multiple of ``size``, in place.

    Multiplying by one small factor after the other takes a tenth of the operations of one large product and, unlike
    that product, gives the same result on every device and for every cut.
    """
    kernel = choose_kernel().kernel if values.device.type == "cpu" else None
    if kernel is not None:
        room = workspace.buffer("rotated", (size,), torch.float64)
        groups = values.view(-1).data_ptr(), values.numel() // size, size
        kernel.library.quanterr_rotate(*groups, 1 / sqrt(size), room.data_ptr())
        return values
    flat, factor = values.view(-1), 4 if is_power_of_four(size) else 2
    source = workspace.buffer("rotated", (flat.numel(),), torch.float64).copy_(flat)
    target = workspace.buffer("back", (flat.numel(),), torch.float64)
    stride = 1
    while stride < size:
        _multiply_small(source.view(-1, factor, stride), target.view(-1, factor, stride), workspace)
        source, target, stride = target, source, stride * factor
    torch.mul(source, 1 / sqrt(size), out=flat)
    return values


def _multiply_small(x: Tensor, y: Tensor, workspace: Workspace) -> None:
    """Set ``y`` to H4 or H2 times ``x`` along the middle axis."""
    if x.shape[1] == 2:
        torch.add(x[:, 0], x[:, 1], out=y[:, 0])
        torch.sub(x[:, 0], x[:, 1], out=y[:, 1])
        return
    total = workspace.buffer("total", (x.shape[0], x.shape[2]), torch.float64)
    torch.add(x[:, 0], x[:, 1], out=total).add_(x[:, 2]).add_(x[:, 3])
    for row in range(4):  # row r of H4 is ones, with -1 at column 3 - r
        torch.sub(total, x[:, 3 - row], alpha=2, out=y[:, row])
