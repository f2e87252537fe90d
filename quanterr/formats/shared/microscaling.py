"""Small floats with a one-byte scale per block of columns: the common part of MXFP4, MXFP6, MXFP8 and NVFP4.

    codes    (rows, cols) of E2M1, two per byte, the first in the low bits; of E2M3 or E3M2, four in three bytes,
             the first in the lowest bits; or of E4M3 or E5M2; stored as bytes or words of any dtype
    scale    (rows, cols / block) bytes, in rows or in tiles (shared/swizzled_scales.py): E8M0 exponents, E4M3, E5M3

    weight[r, c] = code[r, c] * scale[r, c // block]                                  one rounding

A global scale first multiplies or divides the block's scale, and the result is rounded. Codes that are padded to a
multiple of 32 columns may be longer than the weight: shared/padding.py.

Reference: OCP Microscaling Formats (MX) 1.0, 5.2 and 5.3.
"""

from typing import Literal

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types, pre_quant_scale
from quanterr.formats.shared.padding import Padded, fit_unpadded, read_padded
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import E2M1, E2M3, E3M2, E4M3, E5M2, Levels

SmallFloat = Literal["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]
CODE_BITS: dict[SmallFloat, int] = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}
LEVELS: dict[SmallFloat, Levels] = {
    "e2m1": E2M1.centred_levels,
    "e2m3": E2M3,
    "e3m2": E3M2,
    "e4m3": E4M3.centred_levels,
    "e5m2": E5M2.centred_levels,
}
# The levels of codes for which the kernel has no element type, and the dtypes of codes in whole bytes.
CODES: dict[SmallFloat, tuple[float, ...]] = {
    "e2m1": element_types.E2M1,
    "e2m3": element_types.E2M3,
    "e3m2": element_types.E3M2,
    "e5m2": element_types.E5M2,
}
DTYPES: dict[SmallFloat, str] = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
ELEMENTS: dict[str, SmallFloat] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "U8": "e2m1", "I8": "e2m1", "F4": "e2m1"}

NVFP4_PARTS = {  # names in files of ModelOpt and ComfyUI
    "codes": PartSpec(("{weight}",), frozenset({"U8", "F4"})),
    "scale": PartSpec(("{weight}_scale", "{weight}_weight_scale"), frozenset({"F8_E4M3", "U8"})),
    "global_scale": PartSpec(("{weight}_scale_2", "{weight}_weight_scale_2"), frozenset({"F32"})),
    "pre_quant_scale": pre_quant_scale.PART,
}


def read_microscaled(
    codes: Entry,
    element: SmallFloat,
    padded: Padded,
    scale: Grid,
    factor: Grid | None = None,
    unpacked: bool = False,
    high_first: bool = False,
) -> Decoder:
    """Return the decoder of the weight: code · scale, and the factor of the column, if there is one.

    If ``unpacked``, each 6-bit code is in a separate byte, whose high bits mean nothing; if ``high_first``, the first
    of two codes in a byte is in the high bits.
    """
    element_type, ends = element_types.ELEMENTS.get(DTYPES.get(element, ""), (None, ()))
    levels = (4 if unpacked else 1) * CODES.get(element, ())
    decoder = Decoder(
        codes,
        padded.stored_cols,
        element_type,
        levels,
        scale,
        group=padded.step,
        ends=ends,
        high_first=high_first,
        factor=factor,
    )
    return read_padded(padded, decoder)


def make_e5m3_weight(parts: Parts, shape: tuple[int, ...], block: int, global_scale: Entry | None = None) -> Weight:
    """Return the weight of E2M1 codes with an E5M3 scale for ``block`` columns, times a global scale if stored."""
    codes, scale = parts.codes, parts["scale"]
    scales = multiply_scales(Grid(scale, scale.shape[-1], block, levels=element_types.E5M3), global_scale)
    return parts.weight(
        shape,
        read_microscaled(codes, "e2m1", fit_unpadded(parts, shape, block), scales),
        code_bits=4,
        levels=LEVELS["e2m1"],
        block_size=(1, block),
        evidence=(f"codes {codes}, E5M3 scales {scale}",),
    )


def multiply_scales(scale: Grid, global_scale: Entry | None, rows: int = 1, operation: str = "mul") -> Grid:
    """Return scales times a global scale, or one per expert of ``rows`` rows; ``operation`` "div" divides them."""
    if global_scale is None:
        return scale
    return replace(scale, steps=((operation, Grid(global_scale, height=rows, key="global_scale")),))


def check_global_scale(global_scale: Entry, experts: int) -> None:
    """Check that there is one global scale, or one for each expert.

    Raises:
        FormatMismatch: there is another number of scales.
    """
    if global_scale.n not in (1, experts):
        of_experts = f", or one for each of {experts} experts" if experts > 1 else ""
        raise FormatMismatch(f"its global scale {global_scale} should be one{of_experts}")
