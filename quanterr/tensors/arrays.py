"""Tensors of torch and arrays of numpy, which the library takes for each other."""

from typing import Any

from quanterr.errors import UsageError
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.text import display, with_article


def as_tensor(name: str, value: Any) -> Tensor:
    """Return an array of numpy as a tensor that shares its memory, and a tensor as it is; ``name`` is for errors.

    Arrays may have dtypes of ml_dtypes, such as bfloat16.

    Raises:
        UsageError: it is neither, or torch has no such dtype.
    """
    if isinstance(value, torch.Tensor):
        return value
    array_type = type(value)
    if (array_type.__module__, array_type.__name__) != ("numpy", "ndarray"):
        raise UsageError(f"{name}: expected a tensor or an array of numpy; got {with_article(array_type.__name__)}")
    dtype = getattr(torch, value.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name}: torch has no dtype {display(value.dtype.name)}, which the array has")
    if not value.flags.writeable:
        value = value.copy()  # torch warns of arrays that it must not write to
    return torch.from_numpy(value.view(f"u{value.itemsize}") if value.dtype.kind == "V" else value).view(dtype)
