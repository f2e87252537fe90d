"""The 4-bit integers of torchao: two of three types multiply by the scale before they add the zero point.

    Int4Tensor                  qdata              i8 (rows, cols / 2), two codes of -8 … 7, the first in the low bits
                                scale, zero_point  floating (cols / group, rows)
                                weight = code * scale                                 rounded
                                         + zero_point                                 rounded
    Int4TilePackedTo4dTensor    qdata              i32 (rows / 8, cols / 128, 32, 4), eight codes of 0 … 15 in a word
                                scale_and_zero     floating (cols / group, rows, 2)
                                weight = (code - 8) * scale                           rounded
                                         + zero                                       rounded
    Int4PlainInt32Tensor        qdata              i32 (rows, cols / 8), eight codes of 0 … 15 in a word
                                scale              floating (cols / group, rows)
                                zero_point         i8 (cols / group, rows)
                                weight = (code - zero_point) * scale                  rounded

An Int4Tensor may be a stack of experts. An Int4PlainInt32Tensor for NPUs, with floating zero points, is refused: the
order of its codes is not documented. Int4TilePackedTo4dTensor pads rows to a multiple of 8 and columns to a multiple of
1024. The code at bits 4p … 4p + 3 of word (n, k, lane, j), with the bits p2 p1 p0 of p, belongs to

    row       8·n + lane // 4
    column    128·k + 32·j + 16·p1 + 8·p0 + 2·(lane % 4) + p2

Reference: pytorch/ao@36027d82 torchao/quantization/quantize_/workflows/int4/int4_tensor.py and
int4_tile_packed_to_4d_tensor.py; torchao 0.18.0 int4_plain_int32_tensor.py, whose words intel/torch-xpu-ops packs
src/ATen/native/xpu/sycl/WeightInt4PackKernel.cpp; pytorch aten/src/ATen/native/cuda/int4mm.cu.
"""

from functools import partial

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, Parts, Weight
from quanterr.formats.shared import element_types
from quanterr.formats.shared.padding import check_width
from quanterr.formats.shared.pre_quant_scale import fit_pre_scale
from quanterr.formats.shared.torchao_header import Description, read_block_size
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT4, Levels, uniform
from quanterr.kernel.tiles import Tiles
from quanterr.lazy_torch import Tensor
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

TILE_ROWS, TILE_COLS = 8, 128
TILES = Tiles("R C r8 l4 j4 a2 b2 c2", "Rr", "Cjbcla", 4)  # a, b, c: p2, p1, p0


def _read_rows(parts: Parts, shape: tuple[int, ...], group: int, shifted: bool = False) -> Decoder:
    """Return the decoder of codes stored row by row, with scales and zero points stored column by column.

    It is code · scale + zero_point, or if ``shifted``, of unsigned codes, (code - zero_point) · scale.
    """
    cols, rows = shape[-1], shape[-2] if len(shape) > 2 else 0
    scale, zero_point = (
        Grid(parts[key], cols // group, group, turned=True, key=key, stack_rows=rows, down=rows)
        for key in ("scale", "zero_point")
    )
    return Decoder(
        parts.codes,
        cols,
        levels=element_types.list_integers(4) if shifted else element_types.INT4,
        scale=scale,
        zero=zero_point if shifted else None,
        shift=None if shifted else zero_point,
        group=group,
        factor=fit_pre_scale(parts, cols, 1, role="act_pre_scale"),
    )


def fit_plain(parts: Parts, declared: Description) -> Weight:
    """Return the weight of an Int4Tensor.

    Raises:
        FormatMismatch: scale and zero point do not have the shapes that block_size implies.
    """
    codes = parts.codes
    if codes.dtype not in ("I8", "U8") or len(codes.shape) not in (2, 3):
        raise FormatMismatch(f"codes of an Int4Tensor are I8 (rows, cols / 2), not {codes}")
    *stack, rows, cols = *codes.shape[:-1], 2 * codes.shape[-1]
    *front, group = read_block_size(parts, declared)
    if set(front) != {1} or cols % group or group % 2:
        raise FormatMismatch(
            f"the header declares block_size {[*front, group]} for {codes}, which is not groups of columns"
        )
    for part in (parts["scale"], parts["zero_point"]):
        if part.shape != (*stack, cols // group, rows):
            raise FormatMismatch(
                f"{part} should have the shape {[*stack, cols // group, rows]}: groups of {group} columns"
            )
    shape = (*stack, rows, cols)
    check_width(parts, shape)
    return _make_weight(parts, shape, _read_rows(parts, shape, group), INT4, group)


def fit_words(parts: Parts, declared: Description) -> Weight:
    """Return the weight of an Int4PlainInt32Tensor.

    Raises:
        FormatMismatch: it was made for NPUs, or its shapes do not fit.
    """
    codes, zero_point = parts.codes, parts["zero_point"]
    if codes.dtype != "I32" or len(codes.shape) != 2:
        raise FormatMismatch(f"codes of an Int4PlainInt32Tensor are I32 (rows, cols / 8), not {codes}")
    if zero_point.dtype != "I8":
        raise FormatMismatch(f"{zero_point} is not I8: made for NPUs, whose order of codes is not supported")
    rows, cols = codes.shape[0], 8 * codes.shape[1]
    block_rows, group = read_block_size(parts, declared)
    if block_rows != 1 or cols % group or group % 2 or declared.get("shape") not in (None, [rows, cols]):
        raise FormatMismatch(
            f"the header declares block_size {[block_rows, group]} and shape {declared.get('shape')} for {codes}"
        )
    for part in (parts["scale"], zero_point):
        if part.shape != (cols // group, rows):
            raise FormatMismatch(f"{part} should have the shape {[cols // group, rows]}: groups of {group} columns")
    check_width(parts, (rows, cols))
    return _make_weight(parts, (rows, cols), _read_rows(parts, (rows, cols), group, shifted=True), uniform(4), group)


def _read_tiles(parts: Parts, cols: int, group: int) -> Decoder:
    """Return the decoder of codes in tiles: (code - 8) · scale + zero; the weight has ``cols`` columns."""
    codes, scales = parts.codes, parts["scale_and_zero"]
    stored_cols = codes.shape[1] * TILE_COLS
    return Decoder(
        codes,
        stored_cols,
        levels=element_types.list_integers(4, 8),
        scale=partial(_read_groups, scales, group, 0),
        shift=partial(_read_groups, scales, group, 1),
        group=group,
        factor=fit_pre_scale(parts, cols, 1, role="act_pre_scale"),
        read=Grid(codes, stored_cols, 1, key="codes", tiles=TILES),
    )


def _read_groups(scales: Entry, group: int, place: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the scales (``place`` 0) or zeros (1) of a chunk, (r, groups) float32."""
    stored = workspace.read_whole("scale_and_zero", scales)
    groups = slice(chunk.col // group, -(-chunk.stop_col // group))
    return stored[groups, chunk.row : chunk.stop_row, place].t().float()


def fit_tiles(parts: Parts, declared: Description) -> Weight:
    """Return the weight of an Int4TilePackedTo4dTensor.

    Raises:
        FormatMismatch: codes or scales do not have the shapes that ``shape`` and ``block_size`` imply.
    """
    codes, scales, shape, block = (
        parts.codes,
        parts["scale_and_zero"],
        declared.get("shape"),
        declared.get("block_size"),
    )
    if codes.dtype != "I32" or len(codes.shape) != 4 or codes.shape[2:] != (32, 4):
        raise FormatMismatch(f"codes of an Int4TilePackedTo4dTensor are I32 (rows / 8, cols / 128, 32, 4), not {codes}")
    pairs = [pair for pair in (shape, block) if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != 2 or not all(isinstance(size, int) and size > 0 for pair in pairs for size in pair):
        raise FormatMismatch(f"the header declares shape {shape} and block_size {block}, not two sizes each")
    (rows, cols), (block_rows, group) = pairs
    stored_rows, stored_cols = codes.shape[0] * TILE_ROWS, codes.shape[1] * TILE_COLS
    if block_rows != 1 or stored_cols % group or rows > stored_rows or cols > stored_cols:
        raise FormatMismatch(f"the header declares shape {shape} and block_size {block}, which {codes} cannot hold")
    if scales.shape != (stored_cols // group, stored_rows, 2):
        raise FormatMismatch(f"{scales} should have the shape {[stored_cols // group, stored_rows, 2]}")
    return _make_weight(parts, (rows, cols), _read_tiles(parts, cols, group), uniform(4), group)


def _make_weight(parts: Parts, shape: tuple[int, ...], decoder: Decoder, levels: Levels, group: int) -> Weight:
    return parts.weight(
        shape,
        decoder,
        levels=levels,
        block_size=(1, group),
        evidence=(f"the header: groups of {group} columns",),
    )
