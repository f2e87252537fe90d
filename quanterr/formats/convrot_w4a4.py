"""Signed four-bit codes with one scale per row; in ConvRot W4A4 the columns were rotated before quantization.

    weight          i8                (rows, cols / 2), two codes per byte, the first column in the low nibble
    weight_scale    f32, bf16, f16    (rows,) or (rows, 1)

    product[r, c] = float32(code[r, c]) * float32(weight_scale[r])      code in -8 … 7     rounded
    convrot_w4a4     weight = product, un-rotated in groups of columns: kernel/rotation.py    rounded
    int4_tensorwise  weight = product

A label must name the format: from the tensors alone, codes could be INT8 of half the width. convrot_groupsize defaults
to 256. int4_tensorwise with convrot is read as convrot_w4a4. linear_dtype concerns only the runtime.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/convrot_w4a4.py, backends/eager/convrot_w4a4.py.
"""

from functools import partial

from quanterr.formats.base import (
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    RotatedWeight,
    Weight,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FLOATS, INT8, ROTATED_LABELS, check_labels
from quanterr.formats.shared.convrot import find_group_size, read_rotated, rotate
from quanterr.formats.shared.padding import Padded, fit_padded, read_padded
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT4

LABELS = frozenset({"convrot_w4a4", "int4_convrot_w4a4", "int4_tensorwise"})
NEEDS = {
    "codes": PartSpec(("{weight}",), INT8),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
}


def fit(rotated: bool, parts: Parts) -> Weight | None:
    """Return the weight if its label names this layout."""
    label = next((label for label in parts.hints.labels if label.format in LABELS), None)
    if label is None or rotated != (label.rotated or label.format in ROTATED_LABELS):
        return None
    comfy_format, warnings = check_labels(parts, LABELS, rotates=True)
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) != 2 or scale.shape not in ((codes.shape[0],), (codes.shape[0], 1)):
        raise FormatMismatch(f"its scale {scale} should have one number for each row of {codes}")
    stored = codes.shape[0], 2 * codes.shape[1]
    size, warning = find_group_size(label, stored[1]) if rotated else (2, ())
    padded = fit_padded(parts, stored, size, 1)
    plain = parts.weight(padded.shape, _read(parts, padded, False), code_bits=4, levels=INT4)
    return parts.weight(
        padded.shape,
        _read(parts, padded, rotated),
        code_bits=4,
        levels=None if rotated else INT4,
        rotated=RotatedWeight(plain, partial(rotate, size)) if rotated else None,
        uniform_bits=4,
        scale=scale,
        evidence=(f"{label}, scale {scale}" + (f"; rotated in groups of {size}" if rotated else ""),),
        warnings=(*warnings, *warning),
        comfy_format=comfy_format,
    )


def _read(parts: Parts, padded: Padded, rotated: bool) -> Decoder:
    """Return the decoder of the weight: code · scale, with the rotation undone if ``rotated``."""
    decoder = Decoder(parts.codes, padded.stored_cols, levels=element_types.INT4, scale=Grid(parts["scale"]))
    return read_rotated(decoder, padded) if rotated else read_padded(padded, decoder)


FORMATS = tuple(
    Format(
        name, NEEDS, partial(fit, rotated), summary=f"signed 4-bit codes with one scale per row{of}", usual_db=usual_db
    )
    for name, rotated, of, usual_db in (
        ("convrot_w4a4", True, ", of rotated columns", (18, 19)),
        ("int4_tensorwise", False, "", None),
    )
)
