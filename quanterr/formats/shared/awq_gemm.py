"""Codes of AWQ's gemm layout, whose columns are packed: the common part of AWQ and ParoQuant; see formats/awq.py."""

from functools import partial

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Decoder, Native, Order, Parts, Workspace
from quanterr.formats.shared.bit_packing import Packing, unpack_transposed
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.element_types import list_integers
from quanterr.lazy_torch import Tensor
from quanterr.tensors.workspace import OUTPUT


def _read_zero_points(entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the zero points of a chunk's rows, stored as (blocks, rows), as float32 (r, blocks)."""
    rows = chunk.row, chunk.stop_row
    return unpack_transposed(workspace.read_whole("zeros", entry), packing, rows, workspace, "zero_points")


def _read_codes(entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read the codes of a chunk, stored as (cols, rows), as float32 (r, c)."""
    stored = workspace.read_whole("columns", entry)[chunk.col : chunk.stop_col]
    return unpack_transposed(stored, packing, (chunk.row, chunk.stop_row), workspace, OUTPUT)


def read_gemm(parts: Parts, cols: int, blocks: ColumnBlocks, packing: Packing) -> Native:
    """Return the function that decodes the weight: (code - zero point) · scale. The kernel reads codes of 4 bits."""
    zero_point, middle, is_native = parts.get("zero_point"), 1 << packing.bits - 1, packing.name == "interleaved"
    decoder = Decoder(
        parts.codes,
        cols,
        levels=list_integers(packing.bits, 0 if zero_point else middle),
        scale=blocks.grid(parts["scale"], turned=True),
        zero=blocks.restrict(partial(_read_zero_points, zero_point, packing)) if zero_point else None,
        group=blocks.group,
        order=Order.AWQ_WORDS,
        read=None if is_native else partial(_read_codes, parts.codes, packing),
    )
    return Native(decoder)
