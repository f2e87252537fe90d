"""The linear layers of models in float32 by the library that is faster on this CPU, and attention in pieces."""

from typing import Any

from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.evaluation.running.attention import attend
from quanterr.tensors.products import multiply


class LinearLayers(TorchFunctionMode):
    """A mode that computes the linear layers of float32 models by :func:`multiply`, and attention by :func:`attend`.

    Modes that watch these layers must be entered inside it. Models in float64 must equal torch, and are left to it.
    """

    def __init__(self, dtype: str) -> None:
        """Choose the library for models of this dtype."""
        super().__init__()
        self._own: dict[Any, Any] = {F.scaled_dot_product_attention: attend}
        if dtype == "float32":
            self._own[F.linear] = multiply

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self._own.get(function, function)
        return own(*args, **(kwargs or {}))
