"""Linear layers by oneDNN on CPUs of AMD with AVX-512: MKL, which torch takes for float32, uses half of that there.

Sums are float32 as well, only in another order. Gradients are left to torch, as are other dtypes and devices.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.util.platform import has_amd_cpu


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, as F.linear."""
    if not (_suits(x) and _suits(weight) and weight.dim() == 2 and _onednn_is_faster()):
        return F.linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _suits(values: Tensor) -> bool:
    is_plain = values.dtype is torch.float32 and values.device.type == "cpu" and not values.requires_grad
    return is_plain and values.numel() > 0


@cache
def _onednn_is_faster() -> bool:
    widest = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return widest and has_amd_cpu() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class LinearLayers(TorchFunctionMode):
    """Computes the linear layers of models in float32 by :func:`multiply`; modes that watch them are entered inside.

    What a model in float64 computes in float32 is left as it is: the results are to be those of torch.
    """

    def __init__(self, dtype: str) -> None:
        """``dtype`` is that of the models."""
        super().__init__()
        self._linear = multiply if dtype == "float32" else F.linear

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if function is F.linear else function)(*args, **(kwargs or {}))
