"""compressed-tensors pack-quantized: integers of 1 to 8 bits, packed along the rows.

    weight_packed        i32               (rows, words), or (experts, rows, words)
    weight_scale         f32, bf16, f16    (rows, blocks), or (experts, rows, blocks), or one
    weight_zero_point    i32               (words of rows, blocks), or (experts, …); optional. Packed down columns
                         i8                one, where the scale is one
    weight_shape         i64, i32          (2,) or (3,): shape of the weight
    weight_g_idx         i32               (cols,), optional: shared/column_groups.py

    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]
                                                          one rounding; exact for 16-bit scales

Codes and packed zero points are unsigned; 2^(b-1) is zero. compressed-tensors packs them dense since 0.18; before, each
word held as many whole codes as fit (kernel/packing.py). For 3, 5 and 6 bits the width of the tensor gives the
packing and the bits. Old files of 7 bits are as wide as 8 bits: config.json (num_bits) or else the original
decides. Below 64 columns other widths may coincide too.

Reference: vllm-project/compressed-tensors@ac8e2ba8 compressors/pack_quantized/base.py, helpers.py;
compressed-tensors@0.13.0 compressors/quantized_compressors/pack_quantized.py for the old packing and weight_g_idx.
"""

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks, list_orders
from quanterr.formats.shared.config_checks import read_integers
from quanterr.formats.shared.ct_config import read_setting
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.padding import check_width
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import uniform
from quanterr.kernel.packing import WORD_BITS, CodePacking
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import parse_digits

NEEDS = {
    "codes": PartSpec(("{weight}_packed",), frozenset({"I32"})),
    "scale": PartSpec(("{weight}_scale",), frozenset({"F32", "BF16", "F16"})),
    "zero_point": PartSpec(("{weight}_zero_point",), frozenset({"I32", "I8"}), optional=True),
    "shape": PartSpec(("{weight}_shape",), frozenset({"I64", "I32"})),
    "order": PartSpec(("{weight}_g_idx",), frozenset({"I32"}), optional=True),
}
PACKINGS = tuple(CodePacking("dense", bits) for bits in (4, 8, 2, 3, 5, 6, 7, 1))  # the likeliest first
FLOOR = tuple(CodePacking("floor", bits) for bits in (3, 5, 6, 7))
DENSE_SINCE = (0, 18)


def fit(parts: Parts) -> Weight:
    """Return the weight with the packing that configuration and widths imply; other fitting ones are alternatives."""
    codes, scale, declared_shape = parts.codes, parts["scale"], parts["shape"]
    shape = tuple(read_integers(declared_shape)) if declared_shape.n in (2, 3) else ()
    if len(shape) not in (2, 3) or min(shape) < 1 or codes.shape[:-1] != shape[:-1]:
        raise FormatMismatch(f"{parts['shape']} declares {list(shape)}, but the codes are {codes}")
    if scale.n != 1 and scale.shape[:-1] != shape[:-1]:
        raise FormatMismatch(
            f"its scale {scale} should have one or more for each row of a weight of shape {list(shape)}"
        )
    order = parts.get("order")
    if order is not None and order.shape != shape[1:]:
        raise FormatMismatch(f"{order} should have one number for each column of a weight of shape {list(shape)}")
    check_width(parts, shape)
    blocks = fit_blocks(scale.shape[-1] if scale.n > 1 else 1, shape[-1], read_setting(parts, "group_size"), order)
    packings, orders = _find_packings(parts, shape, blocks.n), list_orders(blocks)
    alternatives = [
        parts.weight(
            shape,
            _read(parts, packing, order),
            block_size=order.edges,
            levels=uniform(packing.bits),
            scale=scale,
            evidence=(f"{packing.bits}-bit codes, {packing.name}, in {codes}, scale {scale}{described}",),
            warnings=blocks.warnings,
            prescribed=len(orders) > 1,
        )
        for packing in packings
        for order, described in orders
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _find_packings(parts: Parts, shape: tuple[int, ...], n_blocks: int) -> list[CodePacking]:
    """Return the packings with which tensors have these widths, the likeliest first.

    Raises:
        FormatMismatch: no packing gives these widths.
    """
    codes, zero_point = parts.codes, parts.get("zero_point")
    dense_first = _read_version(parts.hints.config) >= DENSE_SINCE
    fitting = [
        packing
        for packing in (*PACKINGS, *FLOOR)
        if packing.count(shape[-1]) == codes.shape[-1] and _fits_packing(zero_point, packing, shape, n_blocks)
    ]
    if not fitting:
        beside = f" with {zero_point}" if zero_point else ""
        raise FormatMismatch(f"{codes}{beside} fits no packing of 1 to 8 bits of a weight of shape {list(shape)}")
    declared = read_setting(parts, "num_bits")
    fitting.sort(
        key=lambda packing: (packing.bits != declared, packing.bits == declared and (packing in FLOOR) == dense_first)
    )
    return [packing for packing in fitting if packing.bits == declared] or fitting


def _fits_packing(entry: Entry | None, packing: CodePacking, shape: tuple[int, ...], n_blocks: int) -> bool:
    """Return whether zero points fit the packing, or are absent."""
    if entry is None:
        return True
    if entry.dtype == "I8":
        return entry.n == n_blocks == 1
    return entry.shape == (*shape[:-2], packing.count(shape[-2]), n_blocks)


def _read_version(config: JsonFields) -> tuple[int, ...]:
    """Return the version of the library that wrote the file; a recent one if it is not stated."""
    version = config.get("version")
    words = [parse_digits(word) for word in version.split(".")[:2]] if isinstance(version, str) else []
    numbers = tuple(word for word in words if word is not None)
    return numbers if numbers and len(numbers) == len(words) else DENSE_SINCE


def _read(parts: Parts, packing: CodePacking, blocks: ColumnBlocks) -> Decoder:
    """Return the decoder of the weight: (code - zero point) · scale."""
    codes, zero_point = parts.codes, parts.get("zero_point")
    cols = (
        codes.shape[-1]
        * (WORD_BITS // packing.bits if packing.name == "floor" else WORD_BITS)
        // (1 if packing.name == "floor" else packing.bits)
    )
    return Decoder(
        codes,
        cols,
        levels=list_integers(packing.bits, 0 if zero_point else 1 << packing.bits - 1),
        scale=blocks.grid(parts["scale"]),
        zero=_read_zero_points(zero_point, codes, packing, blocks) if zero_point else None,
        group=blocks.group,
        columns=blocks.order,
        read=None if packing.name == "dense" else Grid(codes, cols, 1, key="words", packing=packing),
    )


def _read_zero_points(entry: Entry, codes: Entry, packing: CodePacking, blocks: ColumnBlocks) -> Grid:
    """Return the zero points: the only one, or codes packed down the columns of each expert."""
    if entry.dtype == "I8":
        return Grid(entry, key="zero_point", steps=(("add", float(1 << packing.bits - 1)),))
    rows = codes.shape[-2] if len(codes.shape) > 2 else 0
    packed = blocks.packed_grid(entry, packing, turned=True)
    return replace(packed, words_down=True, stack_rows=rows, down=rows)


FORMATS = (Format("ct_pack", NEEDS, fit, usual_db=(6, 42), corrects_biases=True),)
