"""torch, imported when it is first used: commands that only read headers need neither its 2 s nor its 200 MB.

Modules that compute write ``from quanterr.lazy_torch import Tensor, torch``. ``Tensor`` is for annotations only:
``isinstance`` takes ``torch.Tensor``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        """Stands for the module torch until a name of it is needed."""

        def __getattr__(self, name: str) -> Any:
            torch = import_module("torch")
            for module in list(sys.modules.values()):  # they get torch itself from now on
                if getattr(module, "__dict__", {}).get("torch") is self:
                    module.torch = torch
            return getattr(torch, name)

    torch, Tensor = _Torch(), Any

__all__ = ["Tensor", "torch"]
