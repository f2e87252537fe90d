"""Factors by which a layer multiplies its input instead of its weight: SmoothQuant and AWQ in ModelOpt.

    pre_quant_scale    f32, bf16, f16    (cols,)

    weight[r, c] = stored weight[r, c] * pre_quant_scale[c]                               rounded

torchao calls them act_pre_scale.

Reference: NVIDIA/Model-Optimizer 0.47 modelopt/torch/export/quant_utils.py (pre_quant_scale of INT8_SQ and AWQ).
"""

from quanterr.formats.base import FormatMismatch, Parts, PartSpec
from quanterr.formats.shared.comfy_labels import FLOATS
from quanterr.kernel.grid import Grid, of_columns

ROLE = "pre_quant_scale"
PART = PartSpec((f"{{module}}.{ROLE}",), FLOATS, optional=True)


def fit_pre_scale(parts: Parts, cols: int, *others: int, role: str = ROLE) -> Grid | None:
    """Return the factors of columns, if stored; instead of ``cols`` of them, there may be another of these numbers.

    Raises:
        FormatMismatch: there is another number of them.
    """
    entry = parts.get(role)
    if entry is None:
        return None
    if entry.n not in (cols, *others):
        raise FormatMismatch(f"{entry} should have one number for each of {cols} columns")
    return of_columns(entry, role)
