"""Plain floating point numbers, as a model is trained and released.

weight    f64, f32, f16, bf16    any shape

weight = the stored numbers, exactly (f64 is compared in float64)
"""

from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Format, Parts, PartSpec, Values, Weight, Workspace
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
        element_types.attach_decoder(parts, partial(dequantize, codes)),
        encoding="floats",
        needs_float64=codes.dtype == "F64",
        warnings=warnings,
    )


def dequantize(codes: Entry, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the stored numbers of a chunk, (r, c) float32 or float64."""
    return Values(element_types.read_floats(codes, chunk, workspace))


FORMATS = (Format("dense", {"codes": PartSpec(("{weight}",), CODES)}, fit),)
