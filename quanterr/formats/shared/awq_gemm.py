"""Codes of AWQ's gemm layout, whose columns are packed: common to AWQ, ParoQuant and Quark; see formats/awq.py."""

from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Native, Order, Parts, Workspace
from quanterr.formats.shared.bit_packing import Packing, unpack_transposed
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import OUTPUT


def _read_zero_points(entry: Entry, packing: Packing, signed: bool, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the zero points of a chunk's rows, stored as (blocks, rows), as float32 (r, blocks)."""
    rows = chunk.row, chunk.stop_row
    codes = unpack_transposed(workspace.read_whole("zeros", entry), packing, rows, workspace, "zero_points")
    return sign(codes, packing.bits) if signed else codes


def sign(codes: Tensor, bits: int) -> Tensor:
    """Return the values of codes in two's complement, both float32."""
    return torch.where(codes < 1 << bits - 1, codes, codes - (1 << bits))


def _read_codes(entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the codes of a chunk, stored as (cols, rows), as float32 (r, c)."""
    stored = workspace.read_whole("columns", entry)[chunk.col : chunk.stop_col]
    return unpack_transposed(stored, packing, (chunk.row, chunk.stop_row), workspace, OUTPUT)


def read_gemm(
    parts: Parts, cols: int, blocks: ColumnBlocks, packing: Packing, levels: tuple[float, ...], signed: bool = False
) -> Native:
    """Return the function that decodes the weight: (level - zero point) · scale.

    The kernel reads codes of 4 bits, if rows are whole words. If ``signed``, zero points are in two's complement.
    """
    zero_point, is_native = parts.get("zero_point"), packing.name == "interleaved" and parts["scale"].shape[1] % 8 == 0
    decoder = Decoder(
        parts.codes,
        cols,
        levels=levels,
        scale=blocks.grid(parts["scale"], turned=True),
        zero=blocks.restrict(partial(_read_zero_points, zero_point, packing, signed)) if zero_point else None,
        group=blocks.group,
        order=Order.AWQ_WORDS,
        read=None if is_native else partial(_read_codes, parts.codes, packing),
    )
    return Native(decoder)
