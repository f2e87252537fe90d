"""EETQ: INT8 codes in the order in which CUTLASS kernels read them, and a scale per row.

    weight           i8     declared (cols, rows); the bytes are laid out as (rows / 2, cols / 64, 2, 64)
    weight_scales    f16    (rows,)

    in each four bytes the second and the third are swapped; the codes are unsigned, offset by 128
    in each 16 columns place t holds column 8 · (t % 4 // 2) + t % 2 + 2 · (t // 4)
    together: in every 16 bytes, even positions hold columns 0 to 7 and odd positions columns 8 to 15

    weight[r, c] = float32(code[r, c]) * float32(weight_scales[r])                    one rounding

This is the order for GPUs of compute capability 7.5 to 8.9; such a GPU must have written the file.

Reference: NetEase-FuXi/EETQ@465e972 csrc/cutlass_kernels/cutlass_preprocessors.cc.
"""

from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.config_checks import check_quant_method
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import uniform
from quanterr.kernel.tiles import Tiles

RUN_BYTES = 64  # consecutive bytes of one row
TILES = Tiles("R C r2 x4 p8 h2", "Rr", "Cxhp", 8)
SATURATED_CODES = (0x00, 0x01, 0xFF)
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"I8"})),
    "scale": PartSpec(("{weight}_scales",), frozenset({"F16"})),
}


def fit(parts: Parts) -> Weight:
    """Return the weight, transposed from its stored shape."""
    codes, scale = parts["codes"], parts["scale"]
    cols, rows = codes.shape if len(codes.shape) == 2 else (0, 0)
    if not rows or rows % 2 or not cols or cols % RUN_BYTES:
        raise FormatMismatch(f"EETQ codes are (cols, rows), a multiple of {RUN_BYTES} and an even number, not {codes}")
    if scale.shape != (rows,):
        raise FormatMismatch(
            f"its scale {scale} should have one number for each of the {rows} rows of {codes}, which is (cols, rows)"
        )
    return parts.weight(
        (rows, cols),
        _read(parts, cols),
        levels=uniform(8),
        scale=scale,
        evidence=(f"EETQ, codes of {rows} rows in the order of CUTLASS kernels",),
        warnings=check_quant_method(parts, "eetq"),
    )


def _read(parts: Parts, cols: int) -> Decoder:
    """Return the decoder of the weight: (code - 128) · scale."""
    codes = parts.codes
    return Decoder(
        codes,
        cols,
        levels=element_types.list_integers(8, 128),
        scale=Grid(parts["scale"]),
        ends=SATURATED_CODES,
        read=Grid(codes, cols, 1, key="codes", tiles=TILES),
    )


FORMATS = (Format("eetq", NEEDS, fit, usual_db=(32, 43)),)
