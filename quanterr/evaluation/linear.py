"""The linear layers of models in float32, computed by the library that is faster on this CPU."""

from typing import Any

from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.tensors.products import multiply


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
