"""bitsandbytes LLM.int8(): INT8 codes and the largest magnitude of each row.

    weight           i8     (rows, cols)
    SCB              f32    (rows,), the largest magnitude of each row
    weight_format    u8     one: 0 means row-major; other values are tiles for old GPUs, which are not read

    weight[r, c] = float32(code[r, c]) * SCB[r]                                       rounded
                   * 0.007874015718698502                                             rounded

Reference: bitsandbytes-foundation/bitsandbytes@95f9af30 bitsandbytes/nn/modules.py Linear8bitLt.
"""

from quanterr.formats.base import Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT8

UNIT = 0.007874015718698502  # 1 / 127 as bitsandbytes writes it
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"I8"})),
    "absmax": PartSpec(("{module}.SCB",), frozenset({"F32"})),
    "format": PartSpec(("{module}.weight_format",), frozenset({"U8"}), optional=True),
}


def fit(parts: Parts) -> Weight:
    """Return the weight if its rows are stored in order."""
    codes, absmax = parts.codes, parts["absmax"]
    if absmax.n != parts.matrix[0] or len(codes.shape) < 2:
        raise FormatMismatch(f"its SCB {absmax} should have one number for each row of {codes}")
    tiles = parts.get("format")
    if tiles and tiles.read() != b"\0" * tiles.nbytes:
        raise FormatMismatch(
            f"{tiles} is {tiles.read()[0]}: tiles for old GPUs (col32, turing, ampere), which are not supported"
        )
    return parts.weight(
        codes.shape,
        element_types.read_one_by_one(
            parts,
            Grid(absmax),
            factor=UNIT,
        ),
        levels=INT8.centred_levels,
        evidence=(f"codes {codes}, largest magnitudes {absmax}",),
    )


FORMATS = (Format("bnb_int8", NEEDS, fit, usual_db=(32, 43)),)
