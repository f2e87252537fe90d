"""SDNQ: integers or small floats of 2 to 8 bits, with a scale for each row or group, or codebooks.

    weight        i8, u8, f8_e4m3, f8_e5m2    (rows, cols) or (rows, groups, size): codes of 8 bits; (cols, rows) if
                                              stored for its matrix product
                  u8                          (runs, bytes of a run) or flat: codes of 2 to 7 bits, row after row,
                                              packed spread: kernel/packing.py
    scale         f32, bf16, f16              (rows, 1), (rows, groups, 1), one, or (1, rows) of (cols, rows);
                                              with a codebook, the values of all codes: (rows, 2^bits),
                                              (rows, groups, 2^bits) or (2^bits,)
    zero_point    f32, bf16, f16              shaped as scale, with unsigned codes
    svd_up        floating                    (rows, rank), or (rank, rows) of (cols, rows); optional
    svd_down      floating                    (rank, cols), or (cols, rank)

    product[r, c] = number(code[r, c]) * scale[r, group of c]                                    rounded
                    + zero_point[r, group of c], with unsigned codes                             rounded
    weight[r, c]  = product[r, c] + sum over k of svd_up[r, k] * svd_down[k, c]                  in float64
                    un-rotated in groups of columns, if config.json sets use_hadamard: kernel/rotation.py

    with a codebook, product[r, c] = scale[r, group of c, code[r, c]]; codes are unsigned integers

    intN      code - 2^(N-1), packed; int8 is not packed
    uintN     code
    floatN_eXmYfn     sign, X bits of exponent, Y of mantissa; bias 2^(X-1) - 1, subnormals, all codes are numbers
    floatN_eXmYfnu    the same without a sign

config.json declares the number type (weights_dtype, modules_dtype_dict); without it the integers are tried first, then
all floats of the same bits as alternatives. Plain int8 or E4M3 with row scales only is read as int8_row or fp8_row.

Reference: Disty0/sdnq 0.2.8, sdnq/dequantizer.py, sdnq/packed_int/pack.py, sdnq/packed_float.py, sdnq/common.py,
sdnq/quant_utils.py build_hadamard.
"""

from __future__ import annotations

import re
from functools import partial
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    Branch,
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    RotatedWeight,
    Weight,
    Workspace,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.comfy_labels import FLOATS
from quanterr.formats.shared.convrot import rotate
from quanterr.formats.shared.padding import check_width
from quanterr.kernel.decoder import LowRank
from quanterr.kernel.grid import UNLIMITED_ROWS, Grid
from quanterr.kernel.interpreter import Native
from quanterr.kernel.levels import OF_DTYPE, Levels, uniform
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import display

METHOD = "sdnq"
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2"})),
    "scale": PartSpec(("{module}.scale",), FLOATS),
    "zero_point": PartSpec(("{module}.zero_point",), FLOATS, optional=True),
    "svd_up": PartSpec(("{module}.svd_up",), FLOATS, optional=True),
    "svd_down": PartSpec(("{module}.svd_down",), FLOATS, optional=True),
}
NAME = re.compile(r"float([2-8])_e(\d)m(\d)fn(u?)(?:_sdnq)?")
EXPONENT_BITS = {  # exponent bits of fpN and ufpN
    "": {2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3},
    "u": {2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4},
}
LEVELS = {"I8": element_types.INT8, "F8_E4M3": element_types.E4M3, "F8_E5M2": element_types.E5M2}
STORED_TYPES = {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "fp8": "float8_e4m3fn"}
CODEBOOKS = tuple((1 << bits,) for bits in range(2, 9))  # possible lengths of a codebook
HADAMARD = 256  # default number of columns that are rotated together
MIN_ROTATION = 4  # minimum number of columns that are rotated together


class NumberType(NamedTuple):
    """An integer or small-float type of SDNQ's codes."""

    name: str  # SDNQ's name
    bits: int
    unsigned: bool
    exponent: int = 0  # exponent bits; 0: integers

    @property
    def levels(self) -> Levels:
        """The values that codes can have."""
        if not self.exponent:
            return uniform(self.bits)
        values = sorted(set(_list_values(self)))
        ends = (0.0, values[-1]) if self.unsigned else (values[0], 0.0)
        low, high = (0x00, 0xFF) if self.unsigned else (0xFF, 0x00)
        return Levels(low, high, values[0], values[-1], tuple(values), at=ends)


def _list_values(coding: NumberType) -> tuple[float, ...]:
    """Return the value of each code of a small float."""
    mantissa = coding.bits - coding.exponent - (not coding.unsigned)
    return element_types.list_small_floats(coding.exponent, mantissa, not coding.unsigned)


def _parse_number_type(name: str) -> NumberType | None:
    """Parse a name in config.json; None if it is not supported."""
    if match := re.fullmatch(r"(u?)int([2-8])", name):
        return NumberType(name, int(match[2]), match[1] == "u")
    if match := re.fullmatch(r"(u?)fp([2-8])", name):
        bits, unsigned = int(match[2]), match[1] == "u"
        exponent = EXPONENT_BITS[match[1]].get(bits, 0)
        return NumberType(name, bits, unsigned, exponent) if exponent else None
    match = NAME.fullmatch(name)
    if match is None:
        return None
    bits, exponent, mantissa, unsigned = int(match[1]), int(match[2]), int(match[3]), match[4] == "u"
    return NumberType(name, bits, unsigned, exponent) if bits == exponent + mantissa + (not unsigned) else None


class SdnqLayout(NamedTuple):
    """The shape of a weight, its blocks of columns, the bits of its codes, and whether they are stored transposed."""

    shape: tuple[int, int]
    blocks: ColumnBlocks
    bits: int
    transposed: bool
    codebook: bool = False  # the scales are the values of all codes of a group


def fit(parts: Parts) -> Weight | None:
    """Return the weight with the declared number type; if undeclared, all types of its bits are alternatives."""
    settings = _read_settings(parts)
    _refuse_settings(settings)
    declared = _read_declared_number_type(parts, settings)
    if settings.get("use_codebook") or (not settings and _is_codebook(parts["scale"])):
        return _fit_codebook(parts, settings, declared)
    layout = _fit_layout(parts, declared.bits if declared else None)
    rotation = _find_rotation(settings, layout.shape[1])
    codes, unsigned = parts.codes, parts.get("zero_point") is not None
    plain = codes.shape == layout.shape and not parts.get("svd_up") and not layout.transposed and not rotation
    if plain and codes.dtype != "U8":
        return None  # left to the formats of shared/scale_grid.py
    if declared and codes.dtype == "U8" and (declared.unsigned, declared.bits) != (unsigned, layout.bits):
        raise FormatMismatch(f"config.json declares {declared.name}, but {_describe_parts(parts)} do not fit")
    codings = [declared] if declared else _list_possible_number_types(layout.bits, unsigned)
    alternatives = [
        _make_weight(parts, layout, coding, rotation) for coding in (codings if codes.dtype == "U8" else [None])
    ]
    if not settings and (rotated := _find_rotation({"use_hadamard": True}, layout.shape[1])):
        alternatives.append(_make_weight(parts, layout, codings[0] if codes.dtype == "U8" else None, rotated))
    return replace(
        alternatives[0].with_alternatives(alternatives[1:]), undeclared=not settings, prescribed=bool(settings)
    )


def _is_codebook(scale: Entry) -> bool:
    """Return whether a scale's last axis can be the values of codes of 2 to 8 bits: it is 1 in all other layouts."""
    return scale.shape[-1:] in CODEBOOKS and len(scale.shape) <= 3


def _fit_codebook(parts: Parts, settings: JsonFields, declared: NumberType | None) -> Weight:
    """Return a weight each of whose groups of columns has a table of values.

    Raises:
        FormatMismatch: codes, tables, the original and config.json do not agree.
    """
    codes, scale, original = parts.codes, parts["scale"], parts.hints.shape
    if codes.dtype != "U8" or not _is_codebook(scale) or parts.get("zero_point"):
        raise FormatMismatch(f"{_describe_parts(parts)} are not codes and the values that they stand for")
    bits = scale.shape[-1].bit_length() - 1
    if declared and declared != NumberType(f"uint{bits}", bits, unsigned=True):
        raise FormatMismatch(
            f"config.json declares {declared.name}, but {scale} has a value for each of {1 << bits} codes"
        )
    groups = scale.shape[1] if len(scale.shape) == 3 else 1
    rows = scale.shape[0] if len(scale.shape) > 1 else original[0] if original else codes.shape[0]
    if len(scale.shape) == 1 and not original and len(codes.shape) != 2 and bits != 8:
        raise FormatMismatch(f"the shape of {codes} is unknown: give an original")
    cols, remainder = divmod(8 * codes.nbytes // bits, max(rows, 1))
    if remainder or not rows or cols % groups:
        raise FormatMismatch(f"{codes} does not hold {rows} rows in {groups} groups of columns, as {scale} has")
    layout = SdnqLayout((rows, cols), ColumnBlocks(groups, cols // groups), bits, transposed=False, codebook=True)
    coding = NumberType(f"uint{bits}", bits, unsigned=True)
    return _make_weight(parts, _check_layout(parts, layout), coding, _find_rotation(settings, cols))


def _read_settings(parts: Parts) -> JsonFields:
    """Return the settings of the layer in config.json; empty if another program wrote it."""
    if parts.hints.config.get("quant_method") != METHOD:
        return {}
    scheme = parts.hints.declarations.of(parts.name)
    return scheme.fields if scheme and scheme.is_quantized else parts.hints.config


def _refuse_settings(settings: JsonFields) -> None:
    for key in ("use_codebook_scale", "scale_dtype", "zero_point_dtype"):
        if settings.get(key) not in (None, False, "none", "float32", "bfloat16", "float16"):
            raise FormatMismatch(
                f"SDNQ with {key} {display(str(settings[key]))} is not supported: dequantize the model with SDNQ, and "
                "compare the result"
            )


def _read_declared_number_type(parts: Parts, settings: JsonFields) -> NumberType | None:
    if not settings:
        return None
    name = str(settings.get("weights_dtype"))
    if STORED_TYPES.get(parts.codes.dtype) == STORED_TYPES.get(name, name):
        return NumberType(name, 8, unsigned=False)
    coding = _parse_number_type(name)
    if coding is None or parts.codes.dtype != "U8":
        raise FormatMismatch(f"config.json declares weights_dtype {display(name)}, which {parts.codes} cannot hold")
    return coding


def _find_rotation(settings: JsonFields, cols: int) -> int:
    """Return how many columns are rotated together; 0 for none.

    It is the setting, rounded up to a power of two and halved until it divides a row.
    """
    if not settings.get("use_hadamard"):
        return 0
    configured = settings.get("hadamard_group_size")
    limit = min(configured if type(configured) is int and configured > 0 else HADAMARD, cols)
    size = 1 << (limit - 1).bit_length()
    while cols % size:
        size //= 2
    return size if size >= MIN_ROTATION else 0


def _fit_layout(parts: Parts, bits: int | None) -> SdnqLayout:
    """Find the layout from the shapes of the parts and the original, and from the declared bits, if any.

    Raises:
        FormatMismatch: the shapes contradict each other or leave the layout open.
    """
    codes, scale = parts.codes, parts["scale"]
    if not codes.shape:
        raise FormatMismatch(f"{codes} should have rows and columns")
    if len(codes.shape) == len(scale.shape) == 2 and scale.shape == (1, codes.shape[1]) and scale.n > 1:
        shape = codes.shape[1], codes.shape[0]
        if parts.hints.shape in (None, shape):
            return _check_layout(parts, SdnqLayout(shape, ColumnBlocks(1, shape[1]), 8, transposed=True))
    groups = scale.shape[1] if len(scale.shape) == 3 else 1
    original = parts.hints.shape
    if (
        codes.dtype != "U8"
        or len(codes.shape) == 3
        or (len(codes.shape) == 2 and (codes.shape == original if original else codes.shape[:1] == scale.shape[:1]))
    ):  # a byte for each code, in rows as long as the original's or in groups
        shape = codes.shape[0], prod(codes.shape[1:])
        bits = 8
    elif original and len(original) == 2 and prod(original):
        shape = original[0], original[1]
        bits = 8 * codes.nbytes // prod(shape)
    elif bits and scale.n > 1:
        shape = scale.shape[0], 8 * codes.nbytes // bits // max(scale.shape[0], 1)
    else:
        raise FormatMismatch(
            f"{_describe_parts(parts)} fit several code widths; only the original or config.json decides"
        )
    if shape[1] % groups:
        raise FormatMismatch(f"{scale} should divide {shape[1]} columns into groups of one size")
    return _check_layout(parts, SdnqLayout(shape, ColumnBlocks(groups, shape[1] // groups), bits, transposed=False))


def _check_layout(parts: Parts, layout: SdnqLayout) -> SdnqLayout:
    codes, zero_point = parts.codes, parts.get("zero_point")
    rows, cols = layout.shape
    run = len(CodePacking("spread", layout.bits).run.codes) if 2 <= layout.bits <= 8 else 0
    if not run or 8 * codes.nbytes != layout.bits * rows * cols or cols % run or 0 in layout.shape:
        raise FormatMismatch(f"{codes} does not hold {rows} × {cols} codes of 2 to 8 bits")
    scales = {role: parts[role] for role in ("scale", "zero_point") if parts.get(role)}
    scales_per_block = 1 << bits if (bits := layout.bits * layout.codebook) else 1
    wrong = next(
        (
            entry
            for entry in scales.values()
            if entry.n not in (scales_per_block, rows * layout.blocks.n * scales_per_block)
        ),
        None,
    )
    if wrong or (zero_point and zero_point.n != parts["scale"].n):
        raise FormatMismatch(f"{wrong or zero_point} does not fit {rows} × {cols} codes, nor {parts['scale']}")
    up, down = parts.get("svd_up"), parts.get("svd_down")
    if up or down:
        shapes = [entry.shape[::-1] if layout.transposed else entry.shape for entry in (up, down) if entry]
        if len(shapes) < 2 or [len(shape) for shape in shapes] != [2, 2] or shapes[0] != (rows, shapes[1][0]):
            raise FormatMismatch(f"svd_up {up} and svd_down {down} do not multiply to {rows} × {cols}")
        if shapes[1][1] != cols:
            raise FormatMismatch(f"svd_down {down} should have {cols} columns")
    return layout


def _describe_parts(parts: Parts) -> str:
    return " and ".join(str(entry) for role, entry in parts.entries.items() if role in ("codes", "scale", "zero_point"))


def _list_possible_number_types(bits: int, unsigned: bool) -> list[NumberType]:
    """Return all number types with this many bits, the likeliest first."""
    letter = "u" if unsigned else ""
    usual = EXPONENT_BITS[letter].get(bits)
    exponents = sorted(range(1, min(bits - (not unsigned), 5) + 1), key=lambda n: n != usual)
    floats = [
        NumberType(f"float{bits}_e{n}m{bits - n - (not unsigned)}fn{letter}", bits, unsigned, n)
        for n in exponents
        if bits - n - (not unsigned) >= 0
    ]
    # Signed 8-bit integers are never among U8 codes: they are stored as I8.
    integers = [] if bits == 8 and not unsigned else [NumberType(f"{letter}int{bits}", bits, unsigned)]
    return [*integers, *floats]


def _make_weight(parts: Parts, layout: SdnqLayout, coding: NumberType | None, rotation: int) -> Weight:
    levels = None if layout.codebook else coding.levels if coding else OF_DTYPE[parts.codes.dtype]
    scale = None if layout.codebook else parts["scale"]
    check_width(parts, layout.shape)
    name = coding.name if coding else STORED_TYPES[parts.codes.dtype]
    low_rank = _fit_low_rank(parts, layout) if parts.get("svd_up") else None
    branch = Branch(partial(low_rank.read_factors, layout.shape, rotation)) if low_rank else None
    described = f"SDNQ {name} in {parts.codes}, scale {parts['scale']}"
    decoder = _describe_codes(parts, layout, coding)
    decoder.low_rank = low_rank
    plain = parts.weight(
        layout.shape,
        decoder,
        code_bits=layout.bits,
        levels=levels,
        block_size=layout.blocks.edges,
        scale=scale,
        branch=branch,
        evidence=(described,),
    )
    if not rotation:
        return plain
    return replace(
        plain,
        dequantize=Native(replace(decoder, rotation=rotation)),
        levels=None,
        rotated=RotatedWeight(plain, partial(rotate, rotation)),
        evidence=(f"{described}; rotated in groups of {rotation}",),
    )


def _fit_low_rank(parts: Parts, layout: SdnqLayout) -> LowRank:
    up, down = parts["svd_up"], parts["svd_down"]
    rank = up.shape[0 if layout.transposed else 1]
    return LowRank(
        Grid(up, rank, turned=layout.transposed, key="svd_up"),
        Grid(down, rank, turned=not layout.transposed, key="svd_down"),
    )


def _describe_codes(parts: Parts, layout: SdnqLayout, coding: NumberType | None) -> Decoder:
    """Return the decoder of the codes: number(code) · scale + zero point."""
    codes, scale, zero_point, blocks, cols = (
        parts.codes,
        parts["scale"],
        parts.get("zero_point"),
        layout.blocks,
        layout.shape[1],
    )
    shift = blocks.grid(zero_point, "zero_point") if zero_point else None
    if coding is None:
        order = Grid(codes, cols, 1, turned=layout.transposed, key="codes", levels=LEVELS[codes.dtype])
        return Decoder(codes, cols, scale=blocks.grid(scale), shift=shift, group=blocks.group, read=order)
    packed = Grid(codes, cols, 1, key="codes", packing=CodePacking("spread", coding.bits))
    if layout.codebook:
        n_tables = scale.n >> layout.bits
        numbers = (
            Grid(scale, blocks.n << layout.bits, key="tables")
            if n_tables > 1
            else Grid(scale, scale.n, 0, UNLIMITED_ROWS)
        )
        return Decoder(codes, cols, shift=shift, group=blocks.group, read=partial(_look_up, packed, numbers, layout))
    middle = 0 if coding.unsigned else 1 << coding.bits - 1
    return Decoder(
        codes,
        cols,
        levels=_list_values(coding) if coding.exponent else element_types.list_integers(coding.bits, middle),
        scale=blocks.grid(scale),
        shift=shift,
        group=blocks.group,
        read=packed,
    )


def _look_up(codes: Grid, tables: Grid, layout: SdnqLayout, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the values of a chunk's codes in the tables of their groups, (r, c) float32."""
    values, places = tables(chunk, workspace), codes(chunk, workspace).long()
    if values.shape[1] > 1 << layout.bits:
        groups = torch.arange(chunk.col, chunk.stop_col, device=places.device) // layout.blocks.size
        places = places + (groups << layout.bits)
    return values.expand(len(places), -1).gather(1, places)


FORMATS = (
    Format(
        "sdnq",
        NEEDS,
        fit,
        summary="SDNQ: integers or small floats of 2 to 8 bits, or codes for tables, by rows or groups",
    ),
)
