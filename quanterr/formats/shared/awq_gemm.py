"""Codes of AWQ's gemm layout, whose columns are packed: the common part of AWQ and ParoQuant; see formats/awq.py."""

from functools import partial

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Dequantize, ElementType, Native, Order, Parts, Values, Workspace
from quanterr.formats.shared import bit_stream
from quanterr.formats.shared.bit_packing import Packing, unpack_transposed
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.gptq_awq_common import read_transposed_scale
from quanterr.kernel.decoder import StoredScales
from quanterr.tensors.workspace import OUTPUT


def dequantize_gemm(parts: Parts, blocks: ColumnBlocks, packing: Packing, chunk: Chunk, workspace: Workspace) -> Values:
    """Return (code - zero point) · scale, (r, c)."""
    rows = chunk.row, chunk.stop_row
    stored = workspace.read_whole("columns", parts.codes)[chunk.col : chunk.stop_col]
    codes = unpack_transposed(stored, packing, rows, workspace, OUTPUT)
    zero_point: Tensor | float = 1 << packing.bits - 1
    if entry := parts.get("zero_point"):
        zero_point = _read_zero_points(entry, packing, chunk, workspace)
    return Values(
        blocks.dequantize(codes, zero_point, read_transposed_scale(parts["scale"], chunk, workspace), chunk, workspace)
    )


def _read_zero_points(entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the zero points of a chunk's rows, stored as (blocks, rows), as float32 (r, blocks)."""
    rows = chunk.row, chunk.stop_row
    return unpack_transposed(workspace.read_whole("zeros", entry), packing, rows, workspace, "zero_points")


def attach_gemm_decoder(parts: Parts, cols: int, blocks: ColumnBlocks, packing: Packing) -> Dequantize:
    """Return :func:`dequantize_gemm`, with a :class:`Decoder` for 4-bit codes."""
    plain, zero_point = partial(dequantize_gemm, parts, blocks, packing), parts.get("zero_point")
    if packing.name != "interleaved":
        return plain
    table = bit_stream.byte_table(8, 0 if zero_point else 1 << packing.bits - 1)  # the decoder deinterleaves
    decoder = Decoder(
        parts.codes,
        cols,
        ElementType.TABLE,
        table,
        scale=blocks.restrict(partial(read_transposed_scale, parts["scale"])),
        zero=blocks.restrict(partial(_read_zero_points, zero_point, packing)) if zero_point else None,
        group=blocks.group,
        order=Order.AWQ_WORDS,
        stored=StoredScales.fit(parts["scale"], parts["scale"].shape[1], blocks.n, turned=True),
    )
    return Native(plain, decoder)
