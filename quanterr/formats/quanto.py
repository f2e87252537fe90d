"""optimum-quanto: codes with a scale per row, or packed codes with a scale and a shift for each group.

    quanto_int8, quanto_float8
    weight._data     i8, f8_e4m3, f8_e5m2    (rows, cols)
    weight._scale    floating                (rows, 1), or one

    weight[r, c] = float32(code[r, c]) * float32(scale[r])                            rounded

    quanto_int4, quanto_int2
    weight._data._data    u8          (groups / codes of a byte, rounded up, group): see
                                      shared/segmented_packing.py, low bits first
    weight._scale         floating    (groups, 1)
    weight._shift         floating    (groups, 1)
                          integer     (groups, 1), in very old files

    weight[e] = scale[e // group] * code[e] - shift[e // group]                       rounded twice
                (code[e] - shift[e // group]) * scale[e // group]                     if the shift is an integer

A group is 128 columns, or fewer if 128 does not divide the columns, or a row; codes of ungrouped convolutions keep
their axes, (rows / codes of a byte, …). The shape of packed weights is not stored: the original gives it; without one
(`inspect`) they are reported as (groups, group).

Reference: huggingface/optimum-quanto@e33f8202 optimum/quanto/tensor/qbits.py, packed.py, grouped.py and
nn/qmodule.py.
"""

from functools import partial
from math import prod

from msgspec.structs import replace

from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.scale_grid import fit_grid, read_grid
from quanterr.formats.shared.segmented_packing import Planes
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import OF_DTYPE, uniform
from quanterr.tensors.chunks import as_matrix

FLOATS = frozenset({"F32", "BF16", "F16"})
INTEGERS = frozenset({"I8", "U8", "I16", "I32"})
PACKED_BITS = (4, 2)
DECLARED_BITS = {"int4": 4, "int2": 2, "qint4": 4, "qint2": 2}  # "weights" in quantization_config
SCALE = PartSpec(("{weight}._scale",), FLOATS)
INT8 = {"codes": PartSpec(("{weight}._data",), frozenset({"I8"})), "scale": SCALE}
FLOAT8 = {"codes": PartSpec(("{weight}._data",), frozenset({"F8_E4M3", "F8_E5M2"})), "scale": SCALE}
PACKED_PARTS = {
    "codes": PartSpec(("{weight}._data._data",), frozenset({"U8"})),
    "scale": SCALE,
    "shift": PartSpec(("{weight}._shift",), FLOATS | INTEGERS),
}


def fit_bytes(parts: Parts) -> Weight:
    """Return the weight of one-byte codes."""
    grid = fit_grid(parts["scale"], parts.codes.shape, [])
    if grid.granularity == "block":
        raise FormatMismatch(f"its scale {parts['scale']} should be one, or one for each row of {parts.codes}")
    return parts.weight(
        parts.codes.shape,
        read_grid(parts, grid),
        code_bits=8,
        levels=OF_DTYPE[parts.codes.dtype].centred_levels,
        scale=parts["scale"],
        evidence=(f"codes {parts.codes}, scale {parts['scale']}: {grid.reason}",),
    )


def fit_packed(code_bits: int, parts: Parts) -> Weight | None:
    """Return the weight of packed codes if they have ``code_bits`` bits.

    For one or two groups, codes of 2 and of 4 bits both take one row, so config.json or else the original decides.
    """
    codes, scale, shift = parts.codes, parts["scale"], parts["shift"]
    if len(codes.shape) < 2 or scale.n != shift.n or not scale.n:
        raise FormatMismatch(f"{scale} and {shift} should have one number for each group of {codes}")
    fitting = [size for size in PACKED_BITS if codes.shape[0] == -(-scale.n * size // 8)]
    if not fitting:
        raise FormatMismatch(f"{codes} should have half or a quarter as many rows as {scale} has groups")
    declared = DECLARED_BITS.get(str(parts.hints.config.get("weights")))
    first, *others = [declared] if declared in fitting else fitting
    if code_bits != first:
        return None
    return replace(_fit_bits(first, parts), prescribed=declared == first).with_alternatives(
        _fit_bits(size, parts) for size in others
    )


def _fit_bits(code_bits: int, parts: Parts) -> Weight:
    codes, scale = parts.codes, parts["scale"]
    group = codes.n // codes.shape[0]
    n = scale.n * group
    shape = parts.hints.shape or (scale.n, group)
    if prod(shape) != n or as_matrix(shape)[1] % group:
        raise FormatMismatch(
            f"{codes} and {scale} hold {n} elements in groups of {group}, but the original has the shape {list(shape)}"
        )
    planes = Planes(codes, 1, code_bits, tuple(range(0, 8, code_bits)))
    return parts.weight(
        shape,
        _read(parts, planes, as_matrix(shape), group),
        levels=uniform(code_bits),
        block_size=(1, group),
        format=f"quanto_int{code_bits}",
        evidence=(f"{code_bits} bits in groups of {group}" + ("" if parts.hints.shape else ", shaped as groups"),),
    )


def _read(parts: Parts, planes: Planes, matrix: tuple[int, int], group: int) -> Decoder:
    """Return the decoder: scale · code - shift; (code - shift) · scale for an integer shift."""
    across = matrix[1] // group
    scale, shift = Grid(parts["scale"], across, group), Grid(parts["shift"], across, group, key="shift")
    if parts["shift"].dtype in INTEGERS:
        return planes.decode(matrix, group, scale, zero=shift)
    return planes.decode(matrix, group, scale, shift=replace(shift, steps=(("neg", None),)))


FORMATS = (
    Format(
        "quanto_int8",
        INT8,
        fit_bytes,
        summary="optimum-quanto: INT8 codes, one scale per row",
        usual_db=(32, 43),
        takes_tied_head=True,
    ),
    Format(
        "quanto_float8",
        FLOAT8,
        fit_bytes,
        summary="optimum-quanto: FP8 codes, one scale per row",
        usual_db=(31, 33),
        takes_tied_head=True,
    ),
    Format(
        "quanto_int4",
        PACKED_PARTS,
        partial(fit_packed, 4),
        summary="optimum-quanto: packed 4-bit codes, a scale and a shift for each group of columns",
        usual_db=(18, 20),
        takes_tied_head=True,
        is_shaped_by_original=True,
    ),
    Format(
        "quanto_int2",
        PACKED_PARTS,
        partial(fit_packed, 2),
        summary="optimum-quanto: packed 2-bit codes, a scale and a shift for each group of columns",
        usual_db=(6, 8),
        takes_tied_head=True,
        is_shaped_by_original=True,
    ),
)
