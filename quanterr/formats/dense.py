"""Plain floating point numbers, as a model is trained and released.

weight    f64, f32, f16, bf16    any shape

weight = the stored numbers, exactly (f64 is compared in float64)
"""

from quanterr.formats.base import Format, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types

CODES = frozenset({"F64", "F32", "F16", "BF16"})


def fit(parts: Parts) -> Weight:
    """Return a weight of any shape; warn if a label declares it quantized."""
    codes = parts["codes"]
    warnings = tuple(
        f"{label}, but the weight is stored as {codes.dtype}: read as plain numbers" for label in parts.hints.labels
    )
    return parts.weight(
        codes.shape,
        element_types.read_one_by_one(parts),
        encoding="floats",
        needs_float64=codes.dtype == "F64",
        warnings=warnings,
    )


FORMATS = (Format("dense", {"codes": PartSpec(("{weight}",), CODES)}, fit),)
