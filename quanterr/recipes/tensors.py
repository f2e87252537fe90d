"""Tensors in memory, quantized by a recipe: for training, for experiments and for tests of quantizers.

Values are those that a reader of the stored tensors has: what a recipe writes is read by the same code as a file.
"""

from typing import Any

import torch
from torch import Tensor

from quanterr.errors import UsageError
from quanterr.formats import Hints, Weight, recognize
from quanterr.recipes.base import FLOATS, Recipe, Rows, Source
from quanterr.recipes.candidate import QuantizedFile
from quanterr.recipes.names import recipe_named
from quanterr.recipes.scales import KeptScales
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import TORCH_DTYPES, FilledWorkspace, Workspace

NAME = "tensor.weight"
ROUNDINGS = 1e-6  # of float32, in scales and products
OWN_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U32": torch.uint32}  # where readers need the bits alone
NAMES = {dtype: name for name, dtype in FLOATS.items()}


def quantize_tensor(tensor: Tensor, recipe: str) -> dict[str, Tensor]:
    """What a recipe stores of a weight X.weight, (rows, cols): the tensors of a checkpoint, by name without ``X.``.

    Small floats that torch has no dtype for are uint8 blocks, (rows, bytes).

    Raises:
        UsageError: not a recipe, not a matrix of floats, columns that the recipe cannot group.
        CheckpointError: NaN or infinity.
    """
    file = _file(tensor, _exactly(tensor, recipe))
    found = {}
    for entry in file.entries:
        raw = torch.frombuffer(bytearray(entry.read()) or bytearray(1), dtype=torch.uint8)[: entry.nbytes]
        dtype = OWN_DTYPES.get(entry.dtype, TORCH_DTYPES.get(entry.dtype))
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
    found: Tensor = _StraightThrough.apply(tensor, _exactly(tensor, recipe))  # type: ignore[no-untyped-call]
    return found


def fake_quantized(tensor: Tensor, recipe: Recipe, stretch: float = 1.0) -> Tensor:
    """What readers have of it, float32 (rows, cols), with other scales if asked; errors as of :func:`fake_quantize`."""
    return _values(_file(tensor, recipe, stretch))


def stored_bytes(tensor: Tensor, recipe: Recipe) -> int:
    """What a recipe stores of a weight [bytes]; errors are those of :func:`fake_quantize`."""
    return _file(tensor, recipe).size


def calibrate(tensor: Tensor, recipe: str) -> dict[str, Tensor]:
    """The scales that a recipe makes of a weight, (rows, cols), and all else that it stores but the codes.

    By name as in :func:`quantize_tensor`, whose errors it raises; of types of ggml, whose scales are between the codes,
    empty.
    """
    found = quantize_tensor(tensor, recipe)
    return dict(list(found.items())[1:])


def theoretical_max_error(tensor: Tensor, recipe: str) -> Tensor:
    """The most that rounding to the nearest code can change each element, float32 (rows, cols).

    With the scales that the recipe makes of this weight: half of what is between the codes around the element; of one
    beyond the last code, as a calibrator may leave it, its distance to that. Recipes that round scales after they have
    chosen codes (``:double``; Q8_0, Q4_0 and their kind) can be a little beyond it.

    Raises:
        UsageError, CheckpointError: as :func:`quantize_tensor`.
    """
    file = _file(tensor, _exactly(tensor, recipe))
    weight, chunk = weight_of(file), Chunk(0, file.source.rows, 0, file.source.cols)
    filled = FilledWorkspace(torch.device("cpu")), FilledWorkspace(torch.device("cpu"))
    scales = weight.scaling(chunk, filled)
    assert weight.levels is not None and scales is not None  # noqa: S101, PT018 - every recipe's codes have levels
    x = tensor.detach().cpu().float()
    codes = x if scales.shift is None else x - scales.shift
    unit = scales.unit.abs().expand_as(x)
    return torch.where(unit == 0, codes.abs(), weight.levels.room(codes / scales.unit) * unit).view(x.shape)


def error_within_bounds(tensor: Tensor, other: Tensor, recipe: str) -> bool:
    """Whether no element of ``other`` is further from ``tensor`` than :func:`theoretical_max_error`, but for float32.

    For tests of quantizers: ``other`` is what yours makes of ``tensor`` in the format of the recipe, dequantized; both
    are (rows, cols). NaN and infinity are never within.

    Raises:
        UsageError: shapes that differ, or as :func:`quantize_tensor`.
        CheckpointError: as :func:`quantize_tensor`.
    """
    if tensor.shape != other.shape:
        raise UsageError(f"shapes differ: {list(tensor.shape)} and {list(other.shape)}")
    x, y = tensor.detach().cpu().double(), other.detach().cpu().double()
    allowed = theoretical_max_error(tensor, recipe).double() * (1 + ROUNDINGS) + ROUNDINGS * x.abs()
    return bool(((y - x).abs() <= allowed).all())


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: object, tensor: Tensor, recipe: Recipe) -> Tensor:
        return fake_quantized(tensor, recipe).to(tensor.dtype).to(tensor.device)

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def refusal(tensor: Tensor, recipe: Recipe) -> str | None:
    """Why a matrix of floats cannot be stored like that; None if it can."""
    return recipe.scheme.refusal(_source(tensor))


def _exactly(tensor: Tensor, name: str) -> Recipe:
    """Return the recipe of a name, by which the tensor is stored and by no fallback.

    Raises:
        UsageError: not a recipe, or one that falls back to another for these columns.
    """
    recipe = recipe_named(name)
    if tensor.dim() == 2 and (other := recipe.scheme.fallback(tensor.shape[1])) is not None:
        raise UsageError(f"{recipe.name}: {tensor.shape[1]} columns do not fill its blocks; {other.name} stores them")
    return recipe


def _source(tensor: Tensor) -> Source:
    return Source(tensor.shape[0], tensor.shape[1], NAMES[tensor.dtype])


def _file(tensor: Tensor, recipe: Recipe, stretch: float = 1.0) -> QuantizedFile:
    """The stored form of a tensor.

    Raises:
        UsageError: it cannot be stored like that.
    """
    if tensor.dim() != 2 or not tensor.numel() or tensor.dtype not in NAMES:
        raise UsageError(f"{recipe.name}: takes a matrix of float32, bfloat16 or float16, not {list(tensor.shape)}")
    plain = tensor.detach().cpu()
    if why := refusal(plain, recipe):
        raise UsageError(f"{recipe.name}: {why}")
    rows: Rows = lambda first, stop: plain[first:stop].float().clone()  # noqa: E731 - of that type
    return QuantizedFile(NAME, recipe, _source(plain), rows, KeptScales(), stretch)


def weight_of(file: QuantizedFile) -> Weight:
    """What a reader makes of what a recipe stores."""
    entries = {entry.name: entry for entry in file.entries}
    config = file.recipe.scheme.config
    edges: Any = config.get("weight_block_size")
    blocks = (((edges[0], edges[1]), file.recipe.name),) if edges else ()
    hints = Hints(blocks=blocks, shape=(file.source.rows, file.source.cols), config=config)
    codes, *others = file.entries
    return recognize(file.weight, codes, entries, others, hints)


def _values(file: QuantizedFile) -> Tensor:
    """What its readers have, float32 (rows, cols)."""
    rows, cols = file.source.rows, file.source.cols
    weight, workspace = weight_of(file), Workspace(torch.device("cpu"))
    return weight.dequantize(Chunk(0, rows, 0, cols), workspace).weight.clone().view(rows, cols)
