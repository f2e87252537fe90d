"""compressed-tensors int-quantized, where it is more than codes and a scale: with zero points or in act-order.

    weight               i8                (rows, cols), or (experts, rows, cols)
    weight_scale         f32, bf16, f16    (rows, blocks), or (experts, rows, blocks), or one
    weight_zero_point    i8                as the scale; optional
    weight_g_idx         i32               (cols,), optional: shared/column_groups.py

    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]    one rounding

Codes of fewer bits, too, have a byte each (naive-quantized). Without zero points and order: int8_scaled.py.

Reference: vllm-project/compressed-tensors compressors/naive_quantized/base.py, quantization/lifecycle/forward.py.
"""

from functools import partial

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Format, Part, Parts, Values, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import Blocks, fit_blocks
from quanterr.formats.shared.ct_config import said
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

FLOATS = frozenset({"F32", "BF16", "F16"})
INT8 = frozenset({"I8"})
NEEDS = {
    "codes": Part(("{weight}",), INT8),
    "scale": Part(("{weight}_scale",), FLOATS),
    "zero_point": Part(("{weight}_zero_point",), INT8, optional=True),
    "order": Part(("{weight}_g_idx",), frozenset({"I32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """The weight, if it has zero points or an order.

    Raises:
        FormatMismatch: the shapes of codes, scales and zero points do not belong together.
    """
    if parts.hints.labels or not (parts.get("zero_point") or parts.get("order")):
        return None
    shape = parts.codes.shape
    blocks = fit_row_blocks(parts, shape)
    return Weight(
        parts.name,
        "ct_int",
        shape,
        parts.entries,
        partial(dequantize, parts, blocks),
        block_size=blocks.edges,
        code_bits=8,
        uniform_bits=said(parts, "num_bits") or 8,
        scale=parts["scale"],
        evidence=(f"codes {parts.codes}, scale {parts['scale']}",),
        warnings=blocks.warnings,
    )


def fit_row_blocks(parts: Parts, shape: tuple[int, ...]) -> Blocks:
    """The blocks of a weight of that shape, by its scale and what lies beside it.

    Raises:
        FormatMismatch: scale, zero points or order have other shapes.
    """
    scale, zero_point, order = parts["scale"], parts.get("zero_point"), parts.get("order")
    if len(shape) not in (2, 3) or (scale.n != 1 and scale.shape[:-1] != shape[:-1]):
        raise FormatMismatch(
            f"its scale {scale} should be one, or one or more for each row of a weight of shape {list(shape)}"
        )
    if zero_point is not None and zero_point.shape != scale.shape:
        raise FormatMismatch(f"{zero_point} should have the shape of {scale}")
    if order is not None and order.shape != shape[1:]:
        raise FormatMismatch(f"{order} should have one for each column of a weight of shape {list(shape)}")
    return fit_blocks(scale.shape[-1] if scale.n > 1 else 1, shape[-1], said(parts, "group_size"), order)


def of_rows(key: str, entry: Entry, blocks: Blocks, chunk: Chunk, workspace: Workspace) -> Tensor:
    """What blocks share, (r, blocks) or (1, 1) float32, from one for each block of each row, or one for all."""
    if entry.n == 1:
        return workspace.whole(f"one {key}", entry).view(1, 1).float()
    return workspace.read(key, entry, chunk.row * blocks.n, (chunk.shape[0], blocks.n)).float()


def dequantize(parts: Parts, blocks: Blocks, chunk: Chunk, workspace: Workspace) -> Values:
    """(code - zero point) · scale, (r, c)."""
    stored = workspace.read("codes", parts.codes, chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    codes = element_types.int8(stored, workspace)
    return Values(with_zero_points(codes.values, parts, blocks, chunk, workspace), codes.saturated)


def with_zero_points(codes: Tensor, parts: Parts, blocks: Blocks, chunk: Chunk, workspace: Workspace) -> Tensor:
    """(code - zero point) · scale in place, (r, c); the zero point is 0 where none is stored."""
    entry = parts.get("zero_point")
    zero_point = of_rows("zero_point", entry, blocks, chunk, workspace) if entry else 0.0
    scale = of_rows("scale", parts["scale"], blocks, chunk, workspace)
    return blocks.dequantize(codes, zero_point, scale, chunk, workspace)


FORMATS = (
    Format(
        name="ct_int",
        summary="INT8 codes, a scale and a zero point for each block of columns, or an order of columns",
        needs=NEEDS,
        fit=fit,
        specification=__doc__ or "",
        usual_db=(30, 42),
    ),
)
