"""Logarithmic 8-bit codes (µ-law), and a scale per row.

    weight            u8     (rows, cols)
    weight_row_scale  f32    (rows,)

    u = code / 127.5 - 1                          from -1 to 1
    level = sign(u) · (256^|u| - 1) / 255         float32
    weight[r, c] = level[code[r, c]] * weight_row_scale[r]                            one rounding

Reference: ITU-T G.711, with µ = 255 and without its segments.
"""

from math import copysign

from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.kernel.grid import Grid

NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"U8"})),
    "scale": PartSpec(("{weight}_row_scale",), frozenset({"F32"})),
}
MU = 255
LEVELS = tuple(copysign(((1 + MU) ** abs(u) - 1) / MU, u) for u in (code / 127.5 - 1 for code in range(256)))


def fit(parts: Parts) -> Weight:
    """Return the weight, if its scale has a number for each row."""
    codes, scale = parts["codes"], parts["scale"]
    if len(codes.shape) != 2 or scale.shape != codes.shape[:1]:
        raise FormatMismatch(f"µ-law codes are (rows, cols), with a scale for each row, not {codes} and {scale}")
    decoder = Decoder(codes, codes.shape[1], levels=LEVELS, scale=Grid(scale), ends=(0, 255))
    return parts.weight(codes.shape, decoder, code_bits=8, scale=scale, evidence=("µ-law codes",))


FORMATS = (Format("mulaw", NEEDS, fit, usual_db=(30, 45)),)
