"""torchao: tensor subclasses stored as their parts, each described by JSON in the header.

    X._weight_qdata, X._weight_scale, X._weight_zero_point …    the parts of X.weight (X._up_proj_qdata … of X.up_proj)
    __metadata__["X.weight"]    {"_type": "Int8Tensor", "_data": {"block_size": [1, 128], …},
                                 "_tensor_data_names": ["qdata", "scale"]}: all stored parts

    torchao_int8     Int8Tensor          qdata i8 (rows, cols), scale and zero_point for each block_size of
    torchao_intx     IntxUnpackedTo-     columns, or one for all
                     Int8Tensor          weight = (code - zero_point) * scale         rounded
    torchao_fp8      Float8Tensor        qdata f8_e4m3 or f8_e5m2 (rows, cols), scale of each block_size
                                         weight = code * scale                        rounded
    torchao_mx       MXTensor            qdata f8_e4m3, f8_e5m2, two E2M1 codes per byte, or E2M3 or E3M2 codes of
                                         one byte each; scale f8_e8m0 per 32 columns
                                         weight = code * 2^(scale - 127)
    torchao_nvfp4    NVFP4Tensor         qdata two E2M1 codes per byte, scale f8_e4m3 per 16 columns,
                                         per_tensor_scale f32, one or one per expert, or missing
                                         weight = code * (scale * per_tensor_scale)   rounded twice
    torchao_int4     Int4Tensor, Int4PlainInt32Tensor, Int4TilePackedTo4dTensor: shared/torchao_int4.py

All may have experts as a leading axis. If is_swizzled_scales is true, the scales are in the tiles of
shared/swizzled_scales.py; the scales of stacked experts form one matrix. act_pre_scale (cols,) multiplies the layer's
input, and so the columns of the weight, whose values are rounded again. Scales of activations change no weight.

Reference: pytorch/ao@36027d82 torchao/prototype/safetensors/safetensors_support.py; torchao/quantization/quantize_/
workflows; torchao/prototype/mx_formats.
"""

from collections.abc import Callable, Mapping
from math import prod

from msgspec.structs import replace

from quanterr.formats.base import (
    Decoder,
    ElementType,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
)
from quanterr.formats.shared import element_types, torchao_int4
from quanterr.formats.shared.microscaling import (
    CODE_BITS,
    LEVELS,
    SmallFloat,
    check_global_scale,
    multiply_scales,
    read_microscaled,
)
from quanterr.formats.shared.padding import check_width, fit_unpadded
from quanterr.formats.shared.pre_quant_scale import fit_pre_scale
from quanterr.formats.shared.scale_grid import fit_grid, read_grid
from quanterr.formats.shared.swizzled_scales import SWIZZLED_TILES, TILE_COLS, TILE_ROWS
from quanterr.formats.shared.torchao_header import Description, parse_description, read_block_size
from quanterr.kernel.grid import E8M0, Grid
from quanterr.kernel.levels import OF_DTYPE, signed_bytes
from quanterr.util.text import count, display, parse_digits

FLOATS = frozenset({"F32", "BF16", "F16"})
INTEGERS = frozenset({"I8", "I16", "I32", "I64"})


def _make_part(name: str, dtypes: frozenset[str]) -> PartSpec:
    return PartSpec((f"{{private}}_{name}",), dtypes, optional=True)


NEEDS = {
    "codes": PartSpec(("{private}_qdata",), frozenset({"I8", "U8", "F4", "F8_E4M3", "F8_E5M2", "I32"})),
    "scale": _make_part("scale", FLOATS | {"F8_E8M0", "F8_E4M3", "U8"}),
    "zero_point": _make_part("zero_point", INTEGERS | FLOATS),
    "scale_and_zero": _make_part("scale_and_zero", FLOATS),
    "per_tensor_scale": _make_part("per_tensor_scale", FLOATS),
    "act_pre_scale": _make_part("act_pre_scale", FLOATS),
    "act_per_tensor_scale": _make_part("act_per_tensor_scale", FLOATS),
    "act_quant_scale": _make_part("act_quant_scale", FLOATS),
    "act_quant_zero_point": _make_part("act_quant_zero_point", INTEGERS | FLOATS),
}
CODES = "qdata"
ACTIVATIONS = ("act_per_tensor_scale", "act_quant_scale", "act_quant_zero_point")  # scales of inputs, not of the weight


def fit(parts: Parts) -> Weight | None:
    """Return the weight if the header declares this format."""
    text = parts.hints.metadata.get(parts.name)
    if text is None:
        raise FormatMismatch(
            f"{parts.codes} is a torchao tensor, but the header (__metadata__) does not describe "
            f"{display(parts.name)}: "
            "save the checkpoint again with its metadata"
        )
    class_name, declared, listed = parse_description(text)
    if class_name not in KINDS:
        raise FormatMismatch(
            f"the header declares {display(class_name)}, which is not supported; supported are {', '.join(KINDS)}"
        )
    name, needed, optional, read = KINDS[class_name]
    if name != parts.format:
        return None
    if missing := [role for role in needed if role not in parts.entries]:
        raise FormatMismatch(f"its {missing[0]} is missing, which a torchao {class_name} needs")
    if lost := [part for part in listed if part != CODES and part not in parts.entries]:
        raise FormatMismatch(f"its {display(lost[0])} is missing, which the header lists (_tensor_data_names)")
    known_parts = {
        role: entry for role, entry in parts.entries.items() if role in ("codes", *needed, *optional, *ACTIVATIONS)
    }
    return read(replace(parts, entries=known_parts), declared)


def _fit_integers(parts: Parts, declared: Description) -> Weight:
    codes, scale = parts.codes, parts["scale"]
    if codes.dtype != "I8" or len(codes.shape) not in (2, 3):
        raise FormatMismatch(f"codes of {parts.format} are I8 (rows, cols), not {codes}")
    *front, group = read_block_size(parts, declared)
    cols = codes.shape[-1]
    per_tensor = (*front, group) == codes.shape
    if cols % group or not (per_tensor or set(front) == {1}):
        raise FormatMismatch(
            f"the header declares block_size {[*front, group]} for {codes}: "
            "neither groups of columns nor the whole tensor"
        )
    number = 1 if per_tensor else codes.n // group
    for part in (scale, parts.get("zero_point")):
        if part and part.n != number:
            sharing = "one for the whole tensor" if per_tensor else f"one per {group} columns of {codes}"
            raise FormatMismatch(f"{part} should have {count(number, 'number')}: {sharing}")
    if scale.dtype not in FLOATS:
        raise FormatMismatch(f"its scale {scale} should have a floating dtype")
    target = declared.get("target_dtype")
    named = str(target.get("_data")) if isinstance(target, dict) else "int8"
    code_bits = parse_digits(named.removeprefix("int")) or 8
    check_width(parts, codes.shape)
    return parts.weight(
        codes.shape,
        _read_integers(parts, group, per_tensor, code_bits == 8),
        levels=signed_bytes(code_bits),
        block_size=(1, group) if number > prod(codes.shape[:-1]) else None,
        scale=scale,
        evidence=(f"the header: {named} codes, block_size {[*front, group]}",),
    )


def _read_integers(parts: Parts, group: int, per_tensor: bool, counted: bool) -> Decoder:
    """Return the decoder of INT8 codes with a scale and perhaps a zero point for each group, or one (``per_tensor``).

    If ``counted``, codes at either end of their range are counted.
    """
    cols, zero_point = parts.codes.shape[-1], parts.get("zero_point")
    across = 1 if per_tensor else cols // group
    return Decoder(
        parts.codes,
        cols,
        ElementType.I8,
        scale=Grid(parts["scale"], across, group),
        zero=Grid(zero_point, across, group, key="zero_point") if zero_point else None,
        group=0 if per_tensor else group,
        ends=element_types.ELEMENTS["I8"][1] if counted else (),
        factor=fit_pre_scale(parts, cols, 1, role="act_pre_scale"),
    )


def _fit_float8(parts: Parts, declared: Description) -> Weight:
    codes, scale = parts.codes, parts["scale"]
    if codes.dtype not in ("F8_E4M3", "F8_E5M2") or scale.dtype not in FLOATS:
        raise FormatMismatch(f"codes of {parts.format} are FP8 and its scale floating, not {codes} and {scale}")
    *_, rows, cols = (1, 1, *read_block_size(parts, declared))
    grid = fit_grid(scale, codes.shape, [((rows, cols), "the header")])
    return parts.weight(
        codes.shape,
        read_grid(parts, grid),
        code_bits=8,
        levels=OF_DTYPE[codes.dtype].centred_levels,
        block_size=grid.block if grid.granularity == "block" else None,
        scale=scale,
        evidence=(f"the header; scale {scale}: {grid.reason}",),
        warnings=(grid.warning,) if grid.warning else (),
    )


MX_ELEMENTS: dict[str, SmallFloat] = {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float4_e2m1fn_x2": "e2m1",
    "fp6_e2m3": "e2m3",
    "fp6_e3m2": "e3m2",
}


def _fit_mx(parts: Parts, declared: Description) -> Weight:
    elem_dtype = declared.get("elem_dtype")
    named = str(elem_dtype.get("_data") if isinstance(elem_dtype, dict) else elem_dtype)
    element, block = MX_ELEMENTS.get(named), declared.get("block_size")
    if element is None or not isinstance(block, int) or block < 1:
        raise FormatMismatch(
            f"the header declares elements {display(named)} in blocks of {block}, which is not supported"
        )
    return _fit_microscaled(parts, declared, element, block, E8M0)


def _fit_nvfp4(parts: Parts, declared: Description) -> Weight:
    codes, per_tensor = parts.codes, parts.get("per_tensor_scale")
    experts = codes.shape[0] if len(codes.shape) == 3 else 1
    if per_tensor:
        check_global_scale(per_tensor, experts)
    return _fit_microscaled(parts, declared, "e2m1", 16, element_types.E4M3)


def _fit_microscaled(
    parts: Parts, declared: Description, element: SmallFloat, block: int, levels: tuple[float, ...]
) -> Weight:
    codes, scale = parts.codes, parts["scale"]
    dtypes = {"e4m3": ("F8_E4M3",), "e5m2": ("F8_E5M2",), "e2m1": ("U8", "F4")}.get(element, ("U8",))
    unpacked = CODE_BITS[element] == 6
    scale_dtype = "F8_E8M0" if levels is E8M0 else "F8_E4M3"
    if codes.dtype not in dtypes or scale.dtype not in (scale_dtype, "U8") or len(codes.shape) not in (2, 3):
        raise FormatMismatch(
            f"codes of {parts.format} are {dtypes[0]} with scales {scale_dtype}, not {codes} and {scale}"
        )
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if codes.dtype == "U8" and not unpacked else 1))
    tiled = declared.get("is_swizzled_scales") is True
    rows, blocks = prod(shape[:-1]), shape[-1] // block
    stored = -(-rows // TILE_ROWS) * TILE_ROWS * -(-blocks // TILE_COLS) * TILE_COLS if tiled else rows * blocks
    if shape[-1] % block or scale.n != stored:
        way = "in tiles" if tiled else "in rows"
        raise FormatMismatch(
            f"its scale {scale} should have {count(stored, 'number')}, {way}: one per {block} columns of {list(shape)}"
        )
    scales = Grid(scale, blocks, block, levels=levels, tiles=SWIZZLED_TILES if tiled else None)
    scales = multiply_scales(scales, parts.get("per_tensor_scale"), shape[-2])
    return parts.weight(
        shape,
        read_microscaled(codes, element, fit_unpadded(parts, shape, block), scales, unpacked=unpacked),
        code_bits=CODE_BITS[element],
        levels=LEVELS[element],
        block_size=(1, block),
        evidence=(f"the header: {element} in blocks of {block}, scales in {'tiles' if tiled else 'rows'}",),
    )


Read = Callable[[Parts, Description], Weight]

# _type → the row of FORMATS, the parts needed besides the codes, the optional parts, the function that reads them
KINDS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...], Read]] = {
    "Int8Tensor": ("torchao_int8", ("scale",), ("zero_point", "act_pre_scale"), _fit_integers),
    "IntxUnpackedToInt8Tensor": ("torchao_intx", ("scale", "zero_point"), (), _fit_integers),
    "Float8Tensor": ("torchao_fp8", ("scale",), (), _fit_float8),
    "MXTensor": ("torchao_mx", ("scale",), (), _fit_mx),
    "NVFP4Tensor": ("torchao_nvfp4", ("scale",), ("per_tensor_scale",), _fit_nvfp4),
    "Int4Tensor": ("torchao_int4", ("scale", "zero_point"), ("act_pre_scale",), torchao_int4.fit_plain),
    "Int4PlainInt32Tensor": ("torchao_int4", ("scale", "zero_point"), ("act_pre_scale",), torchao_int4.fit_words),
    "Int4TilePackedTo4dTensor": ("torchao_int4", ("scale_and_zero",), ("act_pre_scale",), torchao_int4.fit_tiles),
}

FORMATS = tuple(
    Format(name, NEEDS, fit, summary=f"torchao: {summary}", usual_db=usual_db)
    for name, summary, usual_db in (
        ("torchao_int8", "INT8 codes, a scale and a zero point for each group of columns", (32, 43)),
        ("torchao_intx", "codes of 1 to 8 bits in bytes, a scale and a zero point for each group of columns", None),
        ("torchao_fp8", "FP8 codes, a scale for each block", (31, 33)),
        ("torchao_mx", "E4M3, E5M2, E2M3, E3M2 or E2M1 codes, an E8M0 exponent per 32 columns", None),
        ("torchao_nvfp4", "E2M1 codes, an E4M3 scale per 16 columns, one float32 scale", (19, 21)),
        ("torchao_int4", "4-bit codes, a scale and a shift for each group of columns", (18, 22)),
    )
)
