"""AMD Quark INT4: integers of 4 bits in 32-bit words, signed (int4) or unsigned (uint4).

    one scale per block   weight               i32               (cols, rows / 8), rows packed: transposed
                          weight_scale         f32, bf16, f16    (blocks, rows)
                          weight_zero_point    i32               (blocks, rows / 8), packed the same way; optional
    one scale per row     weight               i32               (rows, cols / 8), columns packed
                          weight_scale         f32, bf16, f16    (rows,)
                          weight_zero_point    i32               (rows / 8,), packed the same way; optional
    quark_int4_fp8        weight               i32               (rows, cols / 8), columns packed
                          weight_scale_2       f32, bf16, f16    (rows,)
                          weight_zero_point_2  i32               (rows / 8,), packed the same way; optional
                          weight_scale         f32, bf16, f16    one: of the FP8 numbers that were quantized again

    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]
                                                          one rounding; exact for 16-bit scales
    quark_int4_fp8: the same with scale_2, times weight_scale                            rounded

Codes are packed interleaved (pack_method reorder) or dense (order): kernel/packing.py. The configuration gives the
packing and the dtype; by default codes are interleaved, and signed if there are no zero points.

Reference: amd-quark 0.13, quark/torch/utils/pack.py Pack_4_bits, quark/torch/export/nn/modules/realquantizer.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.awq_gemm import read_gemm
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.config_checks import read_floats
from quanterr.formats.shared.gptq_awq_common import FLOATS, WORDS
from quanterr.formats.shared.quark_config import find_specifications
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT4, uniform
from quanterr.kernel.packing import CodePacking

NEEDS = {
    "codes": PartSpec(("{weight}",), WORDS),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
    "zero_point": PartSpec(("{weight}_zero_point",), WORDS, optional=True),
}
TWO_SCALES = {
    "codes": PartSpec(("{weight}",), WORDS),
    "scale": PartSpec(("{weight}_scale_2",), FLOATS),
    "zero_point": PartSpec(("{weight}_zero_point_2",), WORDS, optional=True),
    "outer_scale": PartSpec(("{weight}_scale",), FLOATS),
}


class WordCoding(NamedTuple):
    """The packing of the 8 codes in a word, and whether they are signed."""

    packing: CodePacking
    signed: bool

    @property
    def levels(self) -> tuple[float, ...]:
        """The value of each code."""
        return element_types.INT4 if self.signed else element_types.list_integers(4)

    @property
    def zero_levels(self) -> tuple[float, ...]:
        """The zero point that each code means, if it is not the code itself."""
        return element_types.INT4 if self.signed else ()

    def __str__(self) -> str:
        return f"{'signed' if self.signed else 'unsigned'} 4-bit codes, {self.packing.name}"


Read = Callable[[Parts, ColumnBlocks, WordCoding], Decoder]


def fit(parts: Parts) -> Weight:
    """Return the weight, with the other codings that scale and configuration allow as alternatives."""
    codes, scale, zero_point = parts.codes, parts["scale"], parts.get("zero_point")
    if len(codes.shape) != 2 or len(scale.shape) not in (1, 2):
        raise FormatMismatch(_describe_misfit(parts))
    transposed = len(scale.shape) == 2
    rows = scale.shape[-1]
    n_blocks, cols = (scale.shape[0], codes.shape[0]) if transposed else (1, _find_cols(parts, codes.shape[1]))
    packed_rows = -(-rows // 8)
    expected = (cols, packed_rows) if transposed else (rows, -(-cols // 8))
    zeros_shape = (n_blocks, packed_rows) if transposed else (packed_rows,)
    if codes.shape != expected or (zero_point is not None and zero_point.shape != zeros_shape):
        raise FormatMismatch(_describe_misfit(parts))
    declared = next(iter(find_specifications(parts)), {})
    size = declared.get("group_size")
    blocks = fit_blocks(n_blocks, cols, size if isinstance(size, int) else None)
    return _make_weight(parts, (rows, cols), blocks, _read_blocks if transposed else _read_rows, declared.get("dtype"))


def fit_twice(parts: Parts) -> Weight:
    """Return the weight of FP8 numbers that were quantized again with a scale per row."""
    codes, scale, zero_point, outer = parts.codes, parts["scale"], parts.get("zero_point"), parts["outer_scale"]
    if len(codes.shape) != 2 or scale.shape != codes.shape[:1] or outer.n != 1:
        raise FormatMismatch(f"{scale} should have one number for each row of {codes}, and {outer} one for all")
    rows, cols = codes.shape[0], _find_cols(parts, codes.shape[1])
    if zero_point is not None and zero_point.shape != (-(-rows // 8),):
        raise FormatMismatch(f"{zero_point} should have one word per 8 rows of {codes}")
    (factor,) = read_floats(outer)
    return _make_weight(parts, (rows, cols), fit_blocks(1, cols), partial(_read_rows, factor=factor), "int4")


def _make_weight(parts: Parts, shape: tuple[int, int], blocks: ColumnBlocks, read: Read, dtype: object) -> Weight:
    """Return the weight in the likeliest coding that the configuration allows, with the others as alternatives."""
    alternatives = [
        parts.weight(
            shape,
            read(parts, blocks, coding),
            block_size=blocks.edges,
            levels=INT4 if coding.signed else uniform(4),
            scale=parts["scale"],
            evidence=(f"{coding}, in {parts.codes}, scale {parts['scale']}",),
            warnings=blocks.warnings,
        )
        for coding in _list_possible_codings(parts, dtype)
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _describe_misfit(parts: Parts) -> str:
    beside = f" and {zero_point}" if (zero_point := parts.get("zero_point")) else ""
    return (
        f"{parts['scale']}{beside} fit {parts.codes} neither as one per block (codes (cols, rows / 8), scales (blocks, "
        "rows)) nor as one per row (codes (rows, cols / 8), scales (rows,))"
    )


def _find_cols(parts: Parts, width: int) -> int:
    """Return how many columns the original has if they need ``width`` words; else how many the words hold."""
    shape = parts.hints.shape
    return shape[1] if shape and len(shape) == 2 and -(-shape[1] // 8) == width else 8 * width


def _list_possible_codings(parts: Parts, dtype: object) -> list[WordCoding]:
    """Return the codings that the configuration allows, the likeliest first."""
    export = parts.hints.config.get("export")
    method = export.get("pack_method") if isinstance(export, dict) else None
    packings = {"order": ["dense"], "reorder": ["interleaved"]}.get(str(method), ["interleaved", "dense"])
    likely = parts.get("zero_point") is None
    signs = {"int4": [True], "uint4": [False]}.get(str(dtype), [likely, not likely])
    return [WordCoding(CodePacking(packing, 4), signed) for packing in packings for signed in signs]


def _read_blocks(parts: Parts, blocks: ColumnBlocks, coding: WordCoding) -> Decoder:
    """Return the decoder of transposed codes: (code - zero point) · scale, with a scale per block."""
    return read_gemm(parts, parts.codes.shape[0], blocks, coding.packing, coding.levels, coding.zero_levels)


def _read_rows(parts: Parts, _blocks: ColumnBlocks, coding: WordCoding, factor: float | None = None) -> Decoder:
    """Return the decoder of rows of codes: (code - zero point) · scale · factor, with a scale per row."""
    codes, zero_point, packing = parts.codes, parts.get("zero_point"), coding.packing
    cols = 8 * codes.shape[1]
    return Decoder(
        codes,
        cols,
        levels=coding.levels,
        scale=Grid(parts["scale"]),
        zero=ColumnBlocks(1, cols).packed_grid(zero_point, packing, True, coding.zero_levels) if zero_point else None,
        factor=factor,
        read=None if packing.name == "dense" else Grid(codes, cols, 1, key="words", packing=packing),
    )


FORMATS = (
    Format("quark_int4", NEEDS, fit, usual_db=(17, 22)),
    Format(
        "quark_int4_fp8",
        TWO_SCALES,
        fit_twice,
        summary="AMD Quark INT4 of FP8: integers of 4 bits with a scale for each row, and one for all",
        usual_db=(10, 20),
    ),
)
