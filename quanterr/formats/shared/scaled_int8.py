"""INT8 codes with a scale and perhaps rotated columns: the common part of int8_scaled and int8_convrot."""

from functools import partial

from msgspec.structs import replace

from quanterr.formats.base import Parts, PartSpec, RotatedWeight, Weight
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.convrot import read_rotated, rotate
from quanterr.formats.shared.padding import fit_padded
from quanterr.kernel.interpreter import Native

NAMES = (
    "{weight}_scale",
    "{weight}_scale_inv",
    "{weight}_weight_scale",
    "{module}.scale_weight",
    "{module}.scale",
    "{weight}.scale",
)
NEEDS = {"codes": PartSpec(("{weight}",), INT8), "scale": PartSpec(NAMES, FLOATS)}


def read_as_rotated(parts: Parts, plain: Weight, size: int) -> Weight:
    """Return the weight ``plain``, read as if its columns were rotated in groups of ``size``."""
    padded = fit_padded(parts, plain.shape, size, 1)
    assert isinstance(plain.dequantize, Native)  # noqa: S101 - shared/scale_grid.py makes it
    return replace(
        plain,
        format="int8_convrot",
        dequantize=Native(read_rotated(plain.dequantize.decoder, padded)),
        levels=None,
        rotated=RotatedWeight(plain, partial(rotate, size)),
        evidence=(f"{plain.evidence[0]}; rotated in groups of {size}",),
    )
