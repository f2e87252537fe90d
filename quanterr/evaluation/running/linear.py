"""The linear layers of models in float32, computed by the library that is faster on this CPU."""

from typing import Any

from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.tensors.products import multiply


class LinearLayers(TorchFunctionMode):
    """A mode that computes the linear layers of float32 models by :func:`multiply`.

    Modes that watch these layers must be entered inside it. Models in float64 must equal torch, and are left to it.
    """

    def __init__(self, dtype: str) -> None:
        """Choose the library for models of this dtype."""
        super().__init__()
        self._linear = multiply if dtype == "float32" else F.linear

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if function is F.linear else function)(*args, **(kwargs or {}))
