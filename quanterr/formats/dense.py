"""Plain floating point numbers, as a model is trained and released.

weight    f64, f32, f16, bf16    any shape

weight = the stored numbers, exactly (f64 is compared in float64)
"""

from functools import partial

import torch

from quanterr.formats.base import Format, Part, Parts, Values, Weight
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

CODES = frozenset({"F64", "F32", "F16", "BF16"})


def fit(parts: Parts) -> Weight:
    """Any shape fits; a label that says that the weight is quantized is wrong."""
    codes = parts["codes"]
    warnings = tuple(
        f"{label}, but the weight is stored as {codes.dtype}: read as plain numbers" for label in parts.hints.labels
    )
    return Weight(
        parts.name,
        "dense",
        codes.shape,
        parts.entries,
        partial(dequantize, parts),
        needs_float64=codes.dtype == "F64",
        warnings=warnings,
    )


def dequantize(parts: Parts, chunk: Chunk, workspace: Workspace) -> Values:
    """The stored numbers, (r, c), float32 or float64."""
    entry = parts["codes"]
    first = chunk.row * parts.matrix[1] + chunk.col
    stored = workspace.read("stored", entry, first, chunk.shape)
    if entry.dtype == "F64":
        return Values(stored)
    return Values(workspace.buffer("values", chunk.shape, torch.float32).copy_(stored))


FORMATS = (
    Format(
        name="dense",
        summary="F64, F32, F16 or BF16 numbers",
        needs={"codes": Part(("{weight}",), CODES)},
        fit=fit,
        specification=__doc__ or "",
    ),
)
