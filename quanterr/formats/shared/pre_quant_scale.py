"""Factors by which a layer multiplies its input instead of its weight: SmoothQuant and AWQ in ModelOpt.

    pre_quant_scale    f32, bf16, f16    (cols,)

    weight[r, c] = stored weight[r, c] * pre_quant_scale[c]                               rounded

Reference: NVIDIA/Model-Optimizer 0.47 modelopt/torch/export/quant_utils.py (pre_quant_scale of INT8_SQ and AWQ).
"""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared.comfy_labels import FLOATS

PART = PartSpec(("{module}.pre_quant_scale",), FLOATS, optional=True)


def apply_pre_quant_scale(parts: Parts, weight: Weight, stored_cols: int | None = None) -> Weight:
    """Return the weight with its columns multiplied by the factors, if stored; a padded weight has ``stored_cols``.

    Raises:
        FormatMismatch: there is not one factor for each column.
    """
    entry = parts.get("pre_quant_scale")
    if entry is None:
        return weight
    if entry.n not in (weight.matrix[1], stored_cols):
        raise FormatMismatch(f"{entry} should have one number for each of {weight.matrix[1]} columns")
    return replace(
        weight,
        dequantize=partial(_dequantize_multiplied, weight.dequantize, entry),
        unit=None,
        alternatives=tuple(apply_pre_quant_scale(parts, one, stored_cols) for one in weight.alternatives),
    )


def _dequantize_multiplied(
    dequantize: Callable[[Chunk, Workspace], Values], entry: Entry, chunk: Chunk, workspace: Workspace
) -> Values:
    values = dequantize(chunk, workspace)
    factors = workspace.read_whole("pre_quant_scale", entry).view(-1)[chunk.col : chunk.stop_col].float()
    return values._replace(weight=values.weight.mul_(factors))
