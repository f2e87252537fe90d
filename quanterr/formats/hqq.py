"""HQQ: packed codes with a floating-point zero point and scale for each group.

    W_q                  u8, i32         packed codes, 8 / b per element (u8) or ten of 3 bits (i32): see
                                         shared/segmented_packing.py; the first part of the rows in the high bits
                         floating        the same bytes, if view_as_float is 1
    scale, zero          floating        one for each group
    shape                i64             (2,): rows, cols
    axis, group_size     i32             as below
    packing              u8              8bit_u8, 4bit_u8, 3bit_32, 2bit_u8 or 1bit_u8, in ASCII; 5 and 6 bits are
                                         stored as 8
    nbits, view_as_float, unpack_view_dtype, compute_dtype and more, which change nothing else

    axis 1    codes (groups, group_size), scale and zero (groups, 1): the elements of a group follow each other
    axis 0    codes (group_size, groups), scale and zero (1, groups): a group is a column of that matrix
    weight = (code - zero) * scale                                                    rounded twice

Both matrices hold the elements of the weight row by row. Without group_size a group is a row of the weight (axis 1)
or a column (axis 0). A scale or zero point that is itself quantized cannot be read.

Reference: mobiusml/hqq@e0b1d00e hqq/core/quantize.py and bitpack.py.
"""

from dataclasses import dataclass
from math import ceil, prod

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.config_checks import read_floats, read_integers
from quanterr.formats.shared.segmented_packing import PACKINGS, Planes
from quanterr.kernel.grid import Grid, Run
from quanterr.kernel.levels import Levels
from quanterr.util.text import display

FLOATS = frozenset({"F32", "BF16", "F16"})
NUMBERS = frozenset({"I32", "I64"})
BYTES = frozenset({"U8"})
MAX_BYTES = 64  # maximum size of a stored setting: a short text, or one or two numbers

FLAGS = (
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "channel_wise",
    "round_zero",
    "optimize",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
)
TEXTS = ("unpack_view_dtype", "compute_dtype")
NEEDS = {
    "codes": PartSpec(("{module}.W_q",), FLOATS | {"U8", "I32"}),
    "scale": PartSpec(("{module}.scale",), FLOATS),
    "zero": PartSpec(("{module}.zero",), FLOATS),
    "shape": PartSpec(("{module}.shape",), frozenset({"I64"})),
    "packing": PartSpec(("{module}.packing",), BYTES),
    "axis": PartSpec(("{module}.axis",), NUMBERS, optional=True),
    "group_size": PartSpec(("{module}.group_size",), NUMBERS, optional=True),
    "nbits": PartSpec(("{module}.nbits",), NUMBERS | {"F32"}, optional=True),
    **{name: PartSpec((f"{{module}}.{name}",), BYTES, optional=True) for name in (*FLAGS, *TEXTS)},
}


@dataclass(frozen=True, slots=True)
class AxisGroups:
    """Groups of ``size`` elements along ``axis`` of the codes' matrix."""

    matrix: tuple[int, int]  # (rows, cols) of the weight
    axis: int
    size: int
    number: int


def fit(parts: Parts) -> Weight:
    """Return the weight that its small tensors describe."""
    if any(_read_flag(parts, name) for name in ("quant_scale", "quant_zero")):
        raise FormatMismatch(
            "its scale or zero point is itself quantized (quant_scale, quant_zero), which is not supported"
        )
    packing = parts["packing"].read().decode("latin-1") if parts["packing"].nbytes <= MAX_BYTES else ""
    if packing not in PACKINGS:
        raise FormatMismatch(f"its packing {display(packing)} is not one of {', '.join(PACKINGS)}")
    itemsize, code_bits, shifts = PACKINGS[packing]
    stored = {1: "U8", 4: "I32"}[itemsize]
    if not (parts.codes.dtype in FLOATS if _read_flag(parts, "view_as_float") else parts.codes.dtype == stored):
        raise FormatMismatch(
            f"its codes {parts.codes} should be {stored}, or floating with view_as_float, for {packing}"
        )
    shape = tuple(int(size) for size in _read_numbers(parts["shape"]))
    if len(shape) != 2 or min(shape) < 1:
        raise FormatMismatch(f"its shape {parts['shape']} declares {list(shape)}, not rows and columns")
    planes = Planes(parts.codes, itemsize, code_bits, shifts)
    groups = _fit_groups(parts, shape)
    rows = prod(shape) // groups.number if groups.axis == 0 else groups.number  # rows of the codes' matrix
    if planes.codes != -(-rows // len(shifts)) * len(shifts) * (prod(shape) // rows):
        raise FormatMismatch(
            f"{parts.codes} holds {planes.codes} codes of {code_bits} bits, which is not a weight of {list(shape)}"
        )
    nbits = _read_numbers(parts["nbits"])[0] if parts.get("nbits") else code_bits
    if not 1 <= nbits <= code_bits:
        raise FormatMismatch(f"{parts['nbits']} declares {nbits} bits, but its packing is {packing}")
    configured = ceil(nbits)  # 1.58 bits are stored as 2
    return parts.weight(
        shape,
        _read(parts, planes, groups),
        code_bits=configured,
        uniform_bits=configured,
        levels=Levels(0x00, 0xFF, 0.0, float(round(2**nbits) - 1), at=(0.0, 2.0**code_bits - 1)),
        block_size=(1, groups.size) if groups.axis else None,
        evidence=(f"{packing}, groups of {groups.size} along axis {groups.axis}",),
    )


def _find_axis(parts: Parts) -> int:
    """Infer the axis from the scale's shape, (1, groups) or (groups, 1), with which a declared axis must agree."""
    scale = parts["scale"]
    declared = int(_read_numbers(parts["axis"])[0]) if parts.get("axis") else None
    axes: dict[tuple[int, ...], int] = {(1, scale.n): 0, (scale.n, 1): 1} if scale.n > 1 else {}
    shown = axes.get(scale.shape)
    if declared is None and shown is None and scale.n > 1:
        raise FormatMismatch(f"the axis of its groups is unknown: {scale} is neither (1, groups) nor (groups, 1)")
    if None not in (declared, shown) and declared != shown:
        raise FormatMismatch(
            f"{parts['axis']} declares groups along axis {declared}, the shape of {scale} implies axis {shown}"
        )
    return declared if declared is not None else 1 if shown is None else shown


def _fit_groups(parts: Parts, shape: tuple[int, ...]) -> AxisGroups:
    axis = _find_axis(parts)
    size = int(_read_numbers(parts["group_size"])[0]) if parts.get("group_size") else shape[min(max(axis, 0), 1)]
    if axis not in (0, 1) or size < 1 or prod(shape) % size:
        raise FormatMismatch(f"groups of {size} along axis {axis} do not divide a weight of shape {list(shape)}")
    number = prod(shape) // size
    for part in (parts["scale"], parts["zero"]):
        if part.n != number:
            raise FormatMismatch(f"{part} should have one number for each of {number} groups")
    return AxisGroups((shape[0], shape[1]), axis, size, number)


def _read_flag(parts: Parts, name: str) -> bool:
    entry = parts.get(name)
    return entry is not None and entry.nbytes == 1 and entry.read() != b"\0"


def _read_numbers(entry: Entry) -> list[float]:
    if not 0 < entry.nbytes <= MAX_BYTES:
        raise FormatMismatch(f"{entry} should hold one or two numbers")
    return list(read_floats(entry) if entry.dtype in FLOATS else read_integers(entry))


def _read(parts: Parts, planes: Planes, groups: AxisGroups) -> Decoder:
    """Return the decoder of the weight: (code - zero) · scale."""
    cols, size = groups.matrix[1], groups.size
    scale, zero = parts["scale"], parts["zero"]
    if groups.axis == 0:
        return planes.decode(
            groups.matrix, 0, Run(scale, cols, n=groups.number), Run(zero, cols, n=groups.number, key="zero")
        )
    if cols % size:
        return planes.decode(groups.matrix, 0, Run(scale, cols, size), Run(zero, cols, size, key="zero"))
    across = cols // size
    return planes.decode(groups.matrix, size, Grid(scale, across, size), Grid(zero, across, size, key="zero"))


FORMATS = (Format("hqq", NEEDS, fit),)
