"""INT8 codes with a scale, of columns that were rotated before (ConvRot).

    weight    i8                (rows, cols)
    scale     f32, bf16, f16    one, or one a row: as int8_tensor, int8_row and int8_block

    rotated[r, c] = float32(code[r, c]) * float32(scale of r, c)                      rounded
    weight = rotated, turned back in groups of columns: quanterr/formats/rotated.py   rounded

The label says so: convrot, and convrot_groupsize (256, where it says nothing), which differs from layer to
layer. Some writers leave out the format's name.

Reference: Comfy-Org/comfy-kitchen comfy_kitchen/tensor/int8.py, int8_utils.py; silveroxides/convert_to_quant
utils/convrot.py.
"""

from functools import partial

from quanterr.chunks import Chunk
from quanterr.formats.base import Format, Parts, Values, Weight
from quanterr.formats.comfy import INT8_LABELS, check_labels
from quanterr.formats.int8_scaled import NEEDS, multiplied
from quanterr.formats.padded import Padded, fit_padded
from quanterr.formats.rotated import group_size, unrotate
from quanterr.formats.scaled import Grid, fit_grid, hints
from quanterr.tensors import Workspace


def fit(parts: Parts) -> Weight | None:
    """The weight, if its label says that it is rotated.

    Raises:
        Misfit: the groups do not divide a row, or the scale fits no rule.
    """
    labels = parts.hints.labels
    if not labels or not labels[0].rotated:
        return None
    comfy_format, doubts = check_labels(parts, INT8_LABELS, rotates=True)
    size, doubt = group_size(labels[0], parts.codes.shape[-1])
    grid = fit_grid(parts["scale"], parts.codes.shape, hints(parts))
    return Weight(
        parts.name,
        "int8_convrot",
        parts.codes.shape,
        parts.entries,
        partial(dequantize, parts, grid, fit_padded(parts, parts.codes.shape, size), size),
        code_bits=8,
        uniform_bits=8,
        scale=parts["scale"],
        block_size=grid.block if grid.granularity == "block" else None,
        evidence=(f"codes I8, scale {parts['scale']}: {grid.reason}; rotated in groups of {size}",),
        doubts=(*doubts, *doubt, *((grid.doubt,) if grid.doubt else ())),
        comfy_format=comfy_format,
    )


def dequantize(parts: Parts, grid: Grid, padded: Padded, size: int, chunk: Chunk, workspace: Workspace) -> Values:
    """float32(code) · float32(scale), turned back, (r, c)."""
    return padded.dequantize(chunk, workspace, partial(_block, parts, grid, size))


def _block(parts: Parts, grid: Grid, size: int, chunk: Chunk, workspace: Workspace) -> Values:
    rotated = multiplied(parts, grid, chunk, workspace)
    return Values(unrotate(rotated.weight, size, workspace), rotated.saturated)


FORMATS = (
    Format(
        name="int8_convrot",
        summary="INT8 codes with a scale, of rotated columns",
        needs=NEEDS,
        fit=fit,
        specification=__doc__ or "",
        usual_db=(38, 44),
    ),
)
