"""Tensors in memory, quantized by a recipe: for training, for experiments and for tests of quantizers.

Values are those that a reader of the stored tensors has: what a recipe writes is read by the same code as a file.
"""

from typing import Any

import torch
from torch import Tensor

from quanterr.errors import UsageError
from quanterr.formats import Hints, recognize
from quanterr.recipes.base import FLOATS, Recipe, Source
from quanterr.recipes.candidate import KeptScales, QuantizedFile, Rows
from quanterr.recipes.names import recipe_named
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import TORCH_DTYPES, Workspace

NAME = "tensor.weight"
NAMES = {dtype: name for name, dtype in FLOATS.items()}


def quantize_tensor(tensor: Tensor, recipe: str) -> dict[str, Tensor]:
    """What a recipe stores of a weight X.weight, (rows, cols): the tensors of a checkpoint, by name without ``X.``.

    Small floats that torch has no dtype for are uint8 blocks, (rows, bytes).

    Raises:
        UsageError: not a recipe, not a matrix of floats, columns that the recipe cannot group.
        CheckpointError: NaN or infinity.
    """
    file = _file(tensor, recipe_named(recipe))
    found = {}
    for entry in file.entries:
        raw = torch.frombuffer(bytearray(entry.read()) or bytearray(1), dtype=torch.uint8)[: entry.nbytes]
        dtype = {"F8_E4M3": torch.float8_e4m3fn}.get(entry.dtype, TORCH_DTYPES.get(entry.dtype))
        name = entry.name.removeprefix("tensor.")
        found[name] = raw.view(len(tensor), -1) if dtype is None else raw.view(dtype).view(entry.shape)
    return found


def fake_quantize(tensor: Tensor, recipe: str) -> Tensor:
    """A weight, (rows, cols), as a recipe stores it and a reader dequantizes it; in the tensor's dtype.

    The gradient goes straight through, so it serves training too.

    Raises:
        UsageError: not a recipe, not a matrix of floats, columns that the recipe cannot group.
        CheckpointError: NaN or infinity.
    """
    found: Tensor = _StraightThrough.apply(tensor, recipe_named(recipe))  # type: ignore[no-untyped-call]
    return found


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor, recipe: Recipe) -> Tensor:
        return _values(_file(tensor, recipe)).to(tensor.dtype).to(tensor.device)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _file(tensor: Tensor, recipe: Recipe) -> QuantizedFile:
    """The stored form of a tensor.

    Raises:
        UsageError: it cannot be stored like that.
    """
    if tensor.dim() != 2 or not tensor.numel() or tensor.dtype not in NAMES:
        raise UsageError(f"{recipe.name}: takes a matrix of float32, bfloat16 or float16, not {list(tensor.shape)}")
    plain = tensor.detach().cpu()
    source = Source(plain.shape[0], plain.shape[1], NAMES[plain.dtype])
    if why := recipe.scheme.refusal(source):
        raise UsageError(f"{recipe.name}: {why}")
    rows: Rows = lambda first, stop: plain[first:stop].float().clone()  # noqa: E731 - of that type
    return QuantizedFile(NAME, recipe, source, rows, KeptScales())


def _values(file: QuantizedFile) -> Tensor:
    """What its readers have, float32 (rows, cols)."""
    entries = {entry.name: entry for entry in file.entries}
    rows, cols = file.source.rows, file.source.cols
    hints = Hints(shape=(rows, cols), config=file.recipe.scheme.config)
    codes, *others = file.entries
    weight = recognize(NAME, codes, entries, others, hints)
    workspace = Workspace(torch.device("cpu"))
    return weight.dequantize(Chunk(0, rows, 0, cols), workspace).weight.clone().view(rows, cols)
