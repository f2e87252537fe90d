"""Products in float32 by oneDNN on AMD CPUs with AVX-512, where MKL, torch's default, uses half of the vector units.

Sums are float32 as well, only in another order. Gradients are left to torch, as are other dtypes and devices.
"""

from functools import cache

from quanterr.lazy_torch import Tensor, torch
from quanterr.util.platform import has_amd_cpu


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, as F.linear does."""
    is_matrix = weight.dim() == 2 and (weight.is_contiguous() or weight.t().is_contiguous())
    if not (is_matrix and uses_onednn(x) and uses_onednn(weight)):
        return torch.nn.functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def uses_onednn(values: Tensor) -> bool:
    """Return whether oneDNN may compute products with such values.

    It needs whole matrices: if the weight is a slice of another's columns, it takes a thousand times as long.
    """
    is_plain = values.dtype is torch.float32 and values.device.type == "cpu" and not values.requires_grad
    return is_plain and values.numel() > 0 and _onednn_is_faster()


@cache
def _onednn_is_faster() -> bool:
    widest = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return widest and has_amd_cpu() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
