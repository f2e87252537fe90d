"""AWQ: integers of mostly 4 bits, a scale and a zero point for each block of columns.

    gemm         qweight    i32               (cols, rows · b / 32), codes of a column packed: interleaved for
                                              4 bits, dense for other widths; see kernel/packing.py
                 qzeros     i32               (blocks, rows · b / 32), packed the same way; if missing, all zero points
                                              are 2^(b-1)
                 scales     f16, bf16, f32    (blocks, rows)
    gemv         qweight    i32               (rows, cols / 8), codes of a row packed, dense
                 qzeros     i32               (rows, w), packed the same way
                 scales     f16, bf16, f32    (rows, 8 · w); columns beyond the number of blocks are unused
    gemv_fast    qweight    i16               (rows / 4, cols), four rows and 64 columns shuffled; see below
                 qzeros     f16, bf16, f32    (8 · w, rows), minus scale times zero point; llm-awq: scaled_zeros
                 scales     f16, bf16, f32    (8 · w, rows)
    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]    exact for 16-bit scales
    gemv_fast:     code[r, c] * scale[r, block of c] + qzeros[block of c, r]          the sum is rounded

A block is c // group_size. w is the number of blocks divided by 8, rounded up to a multiple of 4 for
blocks of 32 columns, of 2 for 64, of 1 for more.

gemv_fast: nibble i of element (a, 64 b + c) has number s = 4 c + i of 256. It belongs to row 4 a + s // 64 and column
64 b + 32 (s % 64 // 32) + 8 (s % 4) + 2 (s % 32 // 8) + s % 8 // 4.

The shapes distinguish gemm, gemv and GPTQ.

Reference: casper-hansen/AutoAWQ@88e4c76b awq/modules/linear/gemm.py, gemv.py, gemv_fast.py,
awq/utils/packing_utils.py; ModelCloud/GPTQModel@f4c327a1 gptqmodel/quantization/awq/utils/packing_utils.py for other
bits; mit-han-lab/llm-awq awq/quantize/qmodule.py.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from quanterr.formats.base import Decoder, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.awq_gemm import read_gemm
from quanterr.formats.shared.column_groups import ColumnBlocks, fit_blocks
from quanterr.formats.shared.element_types import list_integers
from quanterr.formats.shared.gptq_awq_common import (
    FLOATS,
    SCALE,
    WORDS,
    find_gemm_bits,
    is_gemv,
    read_declared_bits,
    read_declared_group_size,
)
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import uniform
from quanterr.kernel.packing import CodePacking
from quanterr.kernel.tiles import Tiles

SIZES = (128, 64, 32)  # sizes of blocks, the likeliest first
NIBBLES = CodePacking("dense", 4)
ROWS, COLS = 4, 64  # the tile that gemv_fast shuffles
SHUFFLED_TILES = Tiles("R C r4 h2 q4 t2 p4", "Rr", "Chpqt", 4)
MIDDLE_BYTES = {4: b"\x88", 8: b"\x80"}  # bits of a code: a byte of zero points in the middle
PADDING = b"\x00"  # beyond the last block, in gemv

CODES = PartSpec(("{module}.qweight",), WORDS)
GEMM = {"codes": CODES, "scale": SCALE, "zero_point": PartSpec(("{module}.qzeros",), WORDS, optional=True)}
GEMV = {"codes": CODES, "scale": SCALE, "zero_point": PartSpec(("{module}.qzeros",), WORDS)}
FAST = {
    "codes": PartSpec(("{module}.qweight",), frozenset({"I16"})),
    "scale": SCALE,
    "offset": PartSpec(("{module}.qzeros", "{module}.scaled_zeros"), FLOATS),
}


def fit_gemm(parts: Parts) -> Weight | None:
    """Return the weight if the shapes fit gemm."""
    fitting, zero_point = find_gemm_bits(parts.codes, parts["scale"]), parts.get("zero_point")
    bits = read_declared_bits(parts) if read_declared_bits(parts) in fitting else next(iter(fitting), None)
    if bits is None:
        return None
    (cols, width), (n_blocks, rows) = parts.codes.shape, parts["scale"].shape
    if zero_point is not None and zero_point.shape != (n_blocks, width):
        raise FormatMismatch(f"{zero_point} should be as wide as {parts.codes} and as high as {parts['scale']}")
    packing = CodePacking("interleaved" if bits == 4 else "dense", bits)
    blocks = fit_blocks(n_blocks, cols, read_declared_group_size(parts))
    levels = list_integers(bits, 0 if zero_point else 1 << bits - 1)
    return _make_weight(parts, (rows, cols), blocks, packing, read_gemm(parts, cols, blocks, packing, levels))


def fit_gemv(parts: Parts) -> Weight | None:
    """Return the weight if the shapes fit gemv, with other fitting block sizes as alternatives."""
    if not is_gemv(parts):
        return None
    (rows, width), stored = parts.codes.shape, parts["scale"].shape[1]
    cols = 8 * width
    alternatives = [
        _make_weight(parts, (rows, cols), blocks, NIBBLES, _read_gemv(parts, cols, blocks))
        for blocks in _find_blocks(parts, cols, stored)
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def fit_fast(parts: Parts) -> Weight:
    """Return the weight whose codes are in 16-bit words, with other fitting block sizes as alternatives."""
    codes, scale, offset = parts.codes, parts["scale"], parts["offset"]
    if len(codes.shape) != 2 or scale.shape[1:] != (ROWS * codes.shape[0],) or scale.shape != offset.shape:
        raise FormatMismatch(f"{scale} and {offset} should have {ROWS} columns for each row of {codes}")
    if codes.shape[1] % COLS:
        raise FormatMismatch(f"{codes} should have a multiple of {COLS} columns")
    rows, cols = ROWS * codes.shape[0], codes.shape[1]
    alternatives = [
        _make_weight(parts, (rows, cols), blocks, NIBBLES, _read_fast(parts, blocks))
        for blocks in _find_blocks(parts, cols, scale.shape[0])
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _find_blocks(parts: Parts, cols: int, stored: int) -> list[ColumnBlocks]:
    """Return the possible blocks of ``cols`` columns for ``stored`` padded blocks, the likeliest first.

    Raises:
        FormatMismatch: no blocks fit.
    """
    declared = read_declared_group_size(parts) or 0
    sizes = dict.fromkeys((declared if declared > 0 else cols if declared else 0, *SIZES, cols))
    fitting = [size for size in sizes if size and stored == _count_stored_blocks(cols, size)]
    if not fitting:
        raise FormatMismatch(f"{parts['scale']} fits no block size in {cols} columns")
    return [ColumnBlocks(-(-cols // size), size) for size in fitting]


def _count_stored_blocks(cols: int, size: int) -> int:
    """Return the number of stored blocks of this size, padding included."""
    multiple = {32: 4, 64: 2}.get(size, 1)
    width = -(-(cols // size) // 8)
    return 8 * -(-width // multiple) * multiple


def _make_weight(
    parts: Parts, shape: tuple[int, int], blocks: ColumnBlocks, packing: CodePacking, decoder: Decoder
) -> Weight:
    stored, declared = parts["scale"], read_declared_group_size(parts)
    return parts.weight(
        shape,
        decoder,
        block_size=blocks.edges,
        levels=uniform(packing.bits),
        scale=stored if stored.n == shape[0] * blocks.n else None,
        evidence=(f"{packing.bits}-bit codes {parts.codes}, scales {stored}, blocks of {blocks.size} columns",),
        warnings=(
            *blocks.warnings,
            *_find_denied_zero_points(parts, packing.bits),
        ),
        prescribed=blocks.n == 1 if declared == -1 else declared == blocks.size,
    )


def _find_denied_zero_points(parts: Parts, bits: int) -> tuple[str, ...]:
    """Return a warning if the configuration denies zero points, but the first block has others than the middle."""
    entry, middle = parts.get("zero_point"), MIDDLE_BYTES.get(bits)
    if entry is None or middle is None or parts.hints.config.get("zero_point") is not False:
        return ()
    first = entry.file.read(entry.offset, entry.nbytes // max(1, entry.shape[0]))
    if first.strip(middle + PADDING) == b"":
        return ()
    return (
        f"config.json declares zero_point false, but {entry} holds zero points other than {1 << bits - 1}: "
        "loaders that follow it ignore them or refuse the file",
    )


def _read_gemv(parts: Parts, cols: int, blocks: ColumnBlocks) -> Decoder:
    """Return the decoder of gemv: (code - zero point) · scale."""
    width = parts["scale"].shape[1]
    return Decoder(
        parts.codes,
        cols,
        levels=list_integers(NIBBLES.bits),
        scale=blocks.grid(parts["scale"], width=width),
        zero=replace(blocks.packed_grid(parts["zero_point"], NIBBLES), width=width),
        group=blocks.group,
    )


def _read_fast(parts: Parts, blocks: ColumnBlocks) -> Decoder:
    """Return the decoder of gemv_fast: code · scale, rounded, plus the offset, rounded."""
    cols = parts.codes.shape[1]
    return Decoder(
        parts.codes,
        cols,
        scale=blocks.grid(parts["scale"], turned=True, width=parts["scale"].shape[0]),
        shift=blocks.grid(parts["offset"], "offset", turned=True, width=parts["offset"].shape[0]),
        group=blocks.group,
        read=Grid(parts.codes, cols, 1, key="codes", tiles=SHUFFLED_TILES),
    )


def _make_row(name: str, summary: str, needs: Mapping[str, PartSpec], fit: Callable[[Parts], Weight | None]) -> Format:
    version = name.removeprefix("awq_")
    return Format(
        name, needs, fit, summary=summary, usual_db=(18, 22), declared=("version", version), corrects_biases=True
    )


FORMATS = (
    _make_row("awq_gemm", "integers of mostly 4 bits, transposed; a scale and a zero point per block", GEMM, fit_gemm),
    _make_row("awq_gemv", "integers of 4 bits; a scale and a zero point for each block of columns", GEMV, fit_gemv),
    _make_row("awq_gemv_fast", "integers of 4 bits, shuffled; a scale and an offset per block", FAST, fit_fast),
)
