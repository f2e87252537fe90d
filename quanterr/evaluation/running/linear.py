"""The linear layers of float32 models, computed by the library that is faster on this CPU, and attention in pieces."""

from typing import Any

from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.evaluation.running.attention import attend
from quanterr.tensors.products import multiply


class LinearLayers(TorchFunctionMode):
    """A mode that computes the linear layers of float32 models by :func:`multiply`, and attention by :func:`attend`.

    Modes that watch these layers must be entered inside it. Models in float64 are left to torch, whose results must be
    reproduced.
    """

    def __init__(self, dtype: str) -> None:
        """Choose the library for models of this dtype."""
        super().__init__()
        self._replacements: dict[Any, Any] = {F.scaled_dot_product_attention: attend}
        if dtype == "float32":
            self._replacements[F.linear] = multiply

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = self._replacements.get(function, function)
        return replacement(*args, **(kwargs or {}))
