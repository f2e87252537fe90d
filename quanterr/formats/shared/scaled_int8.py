"""INT8 codes with a scale and perhaps rotated columns: the common part of int8_scaled and int8_convrot."""

from functools import partial

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import Parts, PartSpec, RotatedWeight, Values, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.convrot import attach_rotated_decoder, rotate, unrotate
from quanterr.formats.shared.padding import Padded, fit_padded
from quanterr.formats.shared.scale_grid import Grid
from quanterr.kernel.decoder import decoder_of
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

NAMES = (
    "{weight}_scale",
    "{weight}_scale_inv",
    "{weight}_weight_scale",
    "{module}.scale_weight",
    "{module}.scale",
    "{weight}.scale",
)
NEEDS = {"codes": PartSpec(("{weight}",), INT8), "scale": PartSpec(NAMES, FLOATS)}


def dequantize(codes: Entry, grid: Grid, chunk: Chunk, workspace: Workspace) -> Values:
    """Return float32(code) · float32(scale), (r, c)."""
    return grid.multiply(element_types.read_int8(codes, chunk, workspace), chunk, workspace)


def read_as_rotated(parts: Parts, plain: Weight, size: int) -> Weight:
    """Return the weight ``plain``, read as if its columns were rotated in groups of ``size``."""
    padded = fit_padded(parts, plain.shape, size, 1)
    return replace(
        plain,
        format="int8_convrot",
        dequantize=attach_rotated_decoder(partial(_unrotate, plain, padded), decoder_of(plain.dequantize), padded),
        levels=None,
        rotated=RotatedWeight(plain, partial(rotate, size)),
        evidence=(f"{plain.evidence[0]}; rotated in groups of {size}",),
    )


def _unrotate(plain: Weight, padded: Padded, chunk: Chunk, workspace: Workspace) -> Values:
    def block(chunk: Chunk, workspace: Workspace) -> Values:
        rotated = plain.dequantize(chunk, workspace)
        return Values(unrotate(rotated.weight, padded.step, workspace), rotated.saturated)

    return padded.dequantize(chunk, workspace, block)
