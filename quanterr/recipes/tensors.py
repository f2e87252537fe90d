"""Quantization of tensors in memory, or arrays of numpy: for training, experiments and tests of quantizers.

Values equal those that a reader of files computes, because the stored tensors go through the same code.
"""

from typing import Any

from quanterr.declarations import Declarations
from quanterr.errors import UsageError
from quanterr.formats import Hints, StoredParts, Weight, recognize
from quanterr.formats.reading import Reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import FLOATS, Recipe, Rows, Source
from quanterr.recipes.names import parse_recipe
from quanterr.recipes.quantized_file import QuantizedFile
from quanterr.recipes.scales import ScaleCache
from quanterr.tensors.arrays import as_tensor
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import TORCH_DTYPES, find_dtype

TENSOR_NAME = "tensor.weight"
FLOAT32_TOLERANCE = 1e-6  # allowance for the rounding of scales and products in float32, relative
DTYPES_AS_BITS = {"F8_E4M3": torch.float8_e4m3fn, "U32": torch.uint32}  # torch's dtypes where readers use bytes
DTYPE_NAMES = {dtype: name for name, dtype in FLOATS.items()}


def quantize_tensor(tensor: Tensor, recipe: str) -> dict[str, Tensor]:
    """Return the tensors that a recipe stores for a weight X.weight, (rows, cols), by name without ``X.``.

    Types for which torch has no dtype are returned as uint8, (rows, bytes).

    Raises:
        UsageError: the recipe is unknown, the tensor is not a matrix of floats, or the recipe cannot group its columns.
        CheckpointError: the tensor holds NaN or infinity.
    """
    tensor = as_tensor("tensor", tensor)
    file = _make_file(tensor, _parse_exact(tensor, recipe))
    tensors = {}
    for entry in file.entries:
        raw = torch.frombuffer(bytearray(entry.read()) or bytearray(1), dtype=torch.uint8)[: entry.nbytes]
        dtype = DTYPES_AS_BITS.get(entry.dtype) or (find_dtype(entry.dtype) if entry.dtype in TORCH_DTYPES else None)
        name = entry.name.removeprefix("tensor.")
        tensors[name] = raw.view(len(tensor), -1) if dtype is None else raw.view(dtype).view(entry.shape)
    return tensors


def fake_quantize(tensor: Tensor, recipe: str) -> Tensor:
    """Return a weight, (rows, cols), after quantization by a recipe and dequantization, in its own dtype.

    The gradient passes straight through, so the function can be used in training.

    Raises:
        UsageError: the recipe is unknown, the tensor is not a matrix of floats, or the recipe cannot group its columns.
        CheckpointError: the tensor holds NaN or infinity.
    """
    tensor = as_tensor("tensor", tensor)
    quantized: Tensor = _StraightThrough.apply(tensor, _parse_exact(tensor, recipe))  # type: ignore[no-untyped-call]
    return quantized


def apply_recipe(tensor: Tensor, recipe: Recipe, stretch: float = 1.0, importance: Tensor | None = None) -> Tensor:
    """Return a weight as readers see it, float32 (rows, cols); raises the errors of :func:`fake_quantize`.

    ``stretch`` and ``importance`` are as in :class:`QuantizedFile`.
    """
    return _dequantize(_make_file(tensor, recipe, stretch, importance))


def count_stored_bytes(tensor: Tensor, recipe: Recipe) -> int:
    """Return the number of bytes that a recipe stores for a weight; raises the errors of :func:`fake_quantize`."""
    return _make_file(tensor, recipe).size


def calibrate(tensor: Tensor, recipe: str) -> dict[str, Tensor]:
    """Return all tensors that a recipe stores for a weight, (rows, cols), except the codes: scales, tables and so on.

    The result has tensors by name; it is empty for ggml's types, whose scales are stored between the codes. Raises the
    errors of :func:`quantize_tensor`.
    """
    tensors = quantize_tensor(tensor, recipe)
    return dict(list(tensors.items())[1:])


def theoretical_max_error(tensor: Tensor, recipe: str) -> Tensor:
    """Return the largest change of each element by rounding to the nearest code, float32 (rows, cols).

    With the scales that the recipe derives for this weight, this is half the spacing of the codes around the element,
    or the distance to the last code if a calibrator leaves the element beyond it. Recipes that round scales after they
    have chosen codes (``:double``; Q8_0, Q4_0 and similar types) can exceed it slightly.

    Raises:
        UsageError, CheckpointError: for the reasons that :func:`quantize_tensor` states.
    """
    tensor = as_tensor("tensor", tensor)
    file = _make_file(tensor, _parse_exact(tensor, recipe))
    weight, chunk = read_weight(file), Chunk(0, file.source.rows, 0, file.source.cols)
    scales = Reader().read_scaling(weight, chunk)
    assert weight.levels is not None and scales is not None  # noqa: S101, PT018 - every recipe's codes have levels
    x = tensor.detach().cpu().float()
    codes = x if scales.shift is None else x - scales.shift
    unit = scales.unit.abs()
    return torch.where(unit == 0, codes.abs(), weight.levels.room(codes / scales.unit) * unit).view(x.shape)


def error_within_bounds(tensor: Tensor, other: Tensor, recipe: str) -> bool:
    """Return whether no element of ``other`` differs from ``tensor`` by more than :func:`theoretical_max_error`.

    This is for tests of quantizers: ``other`` is ``tensor``, quantized to the recipe's format by your quantizer and
    dequantized; both are (rows, cols). Float32 rounding is allowed for. NaN and infinity are never within bounds.

    Raises:
        UsageError: shapes differ, or :func:`quantize_tensor` refuses the tensor or the recipe.
        CheckpointError: for the reasons that :func:`quantize_tensor` states.
    """
    tensor, other = as_tensor("tensor", tensor), as_tensor("other", other)
    if tensor.shape != other.shape:
        raise UsageError(f"shapes differ: {list(tensor.shape)} and {list(other.shape)}")
    x, y = tensor.detach().cpu().double(), other.detach().cpu().double()
    allowed = theoretical_max_error(tensor, recipe).double() * (1 + FLOAT32_TOLERANCE) + FLOAT32_TOLERANCE * x.abs()
    return bool(((y - x).abs() <= allowed).all())


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: object, tensor: Tensor, recipe: Recipe) -> Tensor:
        return apply_recipe(tensor, recipe).to(tensor.dtype).to(tensor.device)

    @staticmethod
    def backward(_: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def explain_refusal(tensor: Tensor, recipe: Recipe) -> str | None:
    """Explain why a matrix of floats cannot be stored by a recipe; None if it can."""
    return recipe.encoder.explain_refusal(_describe_source(tensor))


def _parse_exact(tensor: Tensor, name: str) -> Recipe:
    """Return the recipe of a name, which must store the tensor itself, without a fallback.

    Raises:
        UsageError: the recipe is unknown, or falls back to another for these columns.
    """
    recipe = parse_recipe(name)
    if tensor.dim() == 2 and (other := recipe.encoder.fallback(tensor.shape[1])) is not None:
        raise UsageError(f"{recipe.name}: {tensor.shape[1]} columns do not fill its blocks; {other.name} stores them")
    return recipe


def _describe_source(tensor: Tensor) -> Source:
    return Source(tensor.shape[0], tensor.shape[1], DTYPE_NAMES[tensor.dtype])


def _make_file(tensor: Tensor, recipe: Recipe, stretch: float = 1.0, importance: Tensor | None = None) -> QuantizedFile:
    """Return the file that a recipe makes of a tensor.

    Raises:
        UsageError: the recipe cannot store it.
    """
    if tensor.dim() != 2 or not tensor.numel() or tensor.dtype not in DTYPE_NAMES:
        given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise UsageError(f"{recipe.name}: takes a matrix of float32, bfloat16 or float16, not {given}")
    plain = tensor.detach().cpu()
    if why := explain_refusal(plain, recipe):
        raise UsageError(f"{recipe.name}: {why}")
    rows: Rows = lambda first, stop: plain[first:stop].float().clone()  # noqa: E731 - the name carries the type
    return QuantizedFile(TENSOR_NAME, recipe, _describe_source(plain), rows, ScaleCache(), stretch, importance)


def read_weight(file: QuantizedFile) -> Weight:
    """Return the weight that a reader makes of a recipe's stored tensors."""
    config = file.recipe.encoder.config
    edges: Any = config.get("weight_block_size")
    blocks = (((edges[0], edges[1]), file.recipe.name),) if edges else ()
    shape = file.source.rows, file.source.cols
    hints = Hints(blocks=blocks, shape=shape, config=config, declarations=Declarations(config))
    codes, *others = file.entries
    return recognize(file.weight, codes, StoredParts({entry.name: entry for entry in file.entries}), others, hints)


def _dequantize(file: QuantizedFile) -> Tensor:
    """Return the values that readers see, float32 (rows, cols)."""
    rows, cols = file.source.rows, file.source.cols
    return Reader().read(read_weight(file), Chunk(0, rows, 0, cols))
