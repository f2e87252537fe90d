"""Numbers cast to FP8 without any scale, as some diffusion models are released.

    weight    f8_e4m3 or f8_e5m2    any shape

    weight = float32(code)

Accepted only if no label, no configuration and no other weight of the checkpoint implies scales: otherwise a missing
scale is an error.

Reference: torch.float8_e4m3fn, torch.float8_e5m2.
"""

from quanterr.formats.base import Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import FP8
from quanterr.kernel.levels import OF_DTYPE


def fit(parts: Parts) -> Weight:
    """Return a weight of any shape, unless something declares a scale."""
    expected = parts.hints.expects_scale or next(map(str, parts.hints.labels), None)
    if expected:
        raise FormatMismatch(f"its scale is missing: {expected}")
    codes = parts["codes"]
    return parts.weight(
        codes.shape,
        element_types.read_one_by_one(parts),
        encoding="cast",
        code_bits=8,
        levels=OF_DTYPE[parts.codes.dtype].centred_levels,
        evidence=(f"codes {codes.dtype} without a scale: a plain cast",),
    )


FORMATS = (Format("fp8_cast", {"codes": PartSpec(("{weight}",), FP8)}, fit),)
