"""Rotation of columns by a Hadamard matrix, group by group.

    rotated[:, group] = W[:, group] @ H        H symmetric and orthogonal, so its own inverse

    size a power of 4        H = kron(H4, …, H4) / sqrt(size), H4 = [[1, 1, 1, -1], [1, 1, -1, 1],
                             [1, -1, 1, 1], [-1, 1, 1, 1]] (ConvRot)
    another power of two     Sylvester: kron([[1, 1], [1, -1]], …) / sqrt(size)

Products are computed in float64 and rounded to float32 once. The compiled kernel does the same operations in the same
order.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/int8_utils.py; silveroxides/convert_to_quant@1.3.4
utils/convrot.py.
"""

from math import sqrt

from quanterr.kernel.library import choose_kernel
from quanterr.lazy_torch import Tensor, torch


def is_power_of_four(size: int) -> bool:
    """Return whether ``size`` is a power of four, so that a ConvRot matrix of that size exists."""
    return size > 1 and size & (size - 1) == 0 and size.bit_length() % 2 == 1


def rotate(values: Tensor, size: int) -> Tensor:
    """Rotate groups of ``size`` columns of ``values``, (r, c) float32, in place, or undo that.

    Multiplying by one small factor after the other takes a tenth of the operations of one large product and, unlike
    that product, gives the same result on every device and for every cut.
    """
    kernel = choose_kernel().kernel if values.device.type == "cpu" else None
    if kernel is not None:
        room = torch.empty(size, dtype=torch.float64)
        groups = values.view(-1).data_ptr(), values.numel() // size, size
        kernel.library.quanterr_rotate(*groups, 1 / sqrt(size), room.data_ptr())
        return values
    wide, factor, stride = values.double().view(-1), 4 if is_power_of_four(size) else 2, 1
    while stride < size:
        wide = _multiply_small(wide.view(-1, factor, stride)).view(-1)
        stride *= factor
    return values.copy_((wide * (1 / sqrt(size))).view(values.shape))


def _multiply_small(x: Tensor) -> Tensor:
    """Return H4 or H2 times ``x`` along the middle axis."""
    if x.shape[1] == 2:
        first, second = x.unbind(1)
        return torch.stack([first + second, first - second], 1)
    a, b, c, d = x.unbind(1)
    total = a + b + c + d
    return torch.stack([total - 2 * column for column in (d, c, b, a)], 1)  # row r of H4 is ones, with -1 at 3 - r
