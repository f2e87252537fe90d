"""Decoding of weights by the compiled kernel, which reads the codes from their files."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Protocol

from quanterr.checkpoints import Entry
from quanterr.kernel.decoder import FLOATS, Decoder, ElementType, SharedBytes, StoredScales
from quanterr.kernel.enums import Order
from quanterr.kernel.interpreter import Values, decoder_of
from quanterr.kernel.library import Kernel
from quanterr.kernel.structs import DONE, SideStruct
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace
from quanterr.util.platform import kernel_file

ELEMENTS_AT_ONCE = 1 << 16  # elements to read, then decode, so that they stay in a core's cache
TILE_ROWS = 32  # rows of transposed codes that are reordered at a time
MAX_COPIED_BYTES = 1 << 14  # maximum size of codes of whole columns that are copied, so that several weights can wait
AWQ_ROWS = 8  # rows per word in AWQ's packing


class Weight(Protocol):
    """The properties of a weight that the kernel needs; formats/base.py defines weights."""

    @property
    def dequantize(self) -> Callable[[Chunk, Workspace], Values]:
        """The function that specifies its values."""

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of the weight."""

    @property
    def needs_float64(self) -> bool:
        """True if float32 cannot hold the values."""


def decode(kernel: Kernel, weight: Weight, chunk: Chunk, workspace: Workspace, out: Tensor) -> bool:
    """Decode a chunk into ``out``, (r, c) float32; return False if the kernel cannot decode it."""
    decoder = find_decoder(weight, [chunk])
    if decoder is None:
        return False
    alive: list[object] = []
    at_once = count_rows_at_once(chunk, (decoder,))
    side = make_code_side(decoder, chunk, at_once, workspace, alive)
    side.values = out.data_ptr()
    return bool(kernel.library.quanterr_decode(ctypes.byref(side), *chunk.shape, at_once) == DONE)


def read_values(kernel: Kernel | None, weight: Weight, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the values of a chunk, as ``weight.dequantize`` does, decoded by the kernel if it can."""
    if kernel is not None and not weight.needs_float64:
        values = workspace.output(chunk.shape)
        if decode(kernel, weight, chunk, workspace, values):
            return values
    return weight.dequantize(chunk, workspace).weight


def read_into(out: Tensor, kernel: Kernel | None, weight: Weight, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read a chunk of whole rows, or of a part of a row, into ``out``, (r, c) float32, and return ``out``."""
    if kernel is None or weight.needs_float64 or not decode(kernel, weight, chunk, workspace, out):
        out.copy_(weight.dequantize(chunk, workspace).weight)
    return out


def measure_error(
    kernel: Kernel, sides: tuple[tuple[Weight, Workspace], tuple[Weight, Workspace]], chunk: Chunk
) -> tuple[float, float] | None:
    """Return Σx² and Σ(y - x)² over a chunk; None if the kernel cannot decode both sides."""
    decoders = [find_decoder(weight, [chunk]) for weight, _ in sides]
    if None in decoders:
        return None
    alive: list[object] = []
    at_once = count_rows_at_once(chunk, decoders)
    x, y = (
        make_code_side(decoder, chunk, at_once, workspace, alive)
        for decoder, (_, workspace) in zip(decoders, sides, strict=True)
        if decoder
    )
    sums = (ctypes.c_double * 2)()
    status = kernel.library.quanterr_measure(ctypes.byref(x), ctypes.byref(y), *chunk.shape, at_once, sums)
    return (sums[0], sums[1]) if status == DONE else None


def find_decoder(weight: Weight, chunks: Sequence[Chunk]) -> Decoder | None:
    """Return the weight's decoder if the kernel can use it for these chunks, else None."""
    decoder = decoder_of(weight.dequantize)
    if decoder is None:
        return None
    cols, (together, _), rotated = weight.matrix[1], decoder.storage_unit, decoder.rotation or 1
    blocks = decoder.blocks
    if decoder.rotation and decoder.cols != cols:
        return None
    if cols % together or decoder.cols % together or (decoder.order == Order.AWQ_WORDS and chunks[0].row % AWQ_ROWS):
        return None
    if chunks[0].stop_col - chunks[0].col == cols:
        return decoder
    if decoder.columns or decoder.order != Order.ROWS or (blocks is not None and (blocks.head or blocks.rows > 1)):
        return None
    units = together, decoder.group or 1, rotated
    begins_blocks = not any(chunk.col % unit for chunk in chunks for unit in units)
    return decoder if begins_blocks else None


def may_wait(decoder: Decoder) -> bool:
    """Return whether operands of several weights can be made before the kernel reads any of them."""
    if decoder.order in (Order.ROWS, Order.SHARED_BYTES):
        return decoder.codes.file.descriptor >= 0
    return decoder.codes.nbytes <= MAX_COPIED_BYTES


def count_rows_at_once(chunk: Chunk, direct: Sequence[Decoder | None]) -> int:
    """Return the number of rows to read and sum at a time."""
    for decoder in direct:  # any() would take five times as long, and this runs for each weight
        if decoder is not None and decoder.order != Order.ROWS:
            return TILE_ROWS
    rows, cols = chunk.shape
    return min(max(ELEMENTS_AT_ONCE // cols, 1), rows)


def make_code_side(
    decoder: Decoder,
    chunk: Chunk,
    at_once: int,
    workspace: Workspace,
    alive: list[object],
    again: bool = False,
    keeps_scales: bool = False,
) -> SideStruct:
    """Make a kernel operand whose codes the kernel reads and decodes itself, ``at_once`` rows at a time.

    ``again`` means that the same chunk is needed several times in a row, so its codes stay in memory. With
    ``keeps_scales``, the scales that the kernel reads get memory of their own, and can be used later.
    """
    entry, (together, n_bytes) = decoder.codes, decoder.storage_unit
    row_bytes = decoder.cols // together * n_bytes
    side = SideStruct(element=decoder.native, order=decoder.order, per_byte=together, row_bytes=row_bytes)
    if decoder.ends:
        side.ends[:], side.has_ends = (3 * decoder.ends)[:3], True
    if decoder.order == Order.ROWS:
        first, rows, more = chunk.row * row_bytes + chunk.col // together * n_bytes, chunk.shape[0], 0
        if (blocks := decoder.blocks) is not None:
            side.blocks, side.lead = ctypes.addressof(blocks), chunk.row % blocks.rows
            side.row_bytes = row_bytes = row_bytes + blocks.head
            alive.append(blocks)
        if blocks is not None and blocks.head + blocks.rows > 1:  # whole groups of rows
            first, more = (chunk.row - side.lead) * row_bytes, 2 * (blocks.rows - 1)
            rows = -(-(side.lead + rows) // blocks.rows) * blocks.rows
        elif rows == 1:  # read a part of a row alone: behind the last row, the file may end
            side.row_bytes = row_bytes = -(-chunk.shape[1] // together) * n_bytes
        side.file, side.offset = kernel_file(entry.file.descriptor), entry.offset + first
        if again or side.file < 0 or workspace.fills(entry):  # pass the bytes, as the kernel reads only local files
            shape = rows, row_bytes
            read = partial(workspace.read_bytes, "native", entry, first, shape)
            side.file, side.stored = -1, workspace.cache("native", entry, (first, shape), read).data_ptr()
        else:
            room = workspace.buffer("native", ((at_once + more) * row_bytes,), torch.uint8)
            side.stored = room.data_ptr()
            alive.append(room)  # the other side may replace this buffer by a larger one
    elif decoder.shared is not None:
        _place_shared_bytes(side, decoder.shared, entry, chunk, workspace, alive)
    else:
        _place_columns(side, decoder, chunk, workspace, alive)
    if (table := decoder.make_table()) is not None:
        side.table = table.data_ptr()
        alive.append(table)
    side.group = decoder.group or max(decoder.cols, 1)
    if decoder.rotation:
        side.rotation, side.unit = decoder.rotation, 1 / sqrt(decoder.rotation)
    side.scale_height, side.factor = 1, decoder.factor or 0.0  # 0: none
    is_read = decoder.stored is not None and _place_scales(
        side, decoder.stored, chunk, decoder.cols, workspace, alive, keeps_scales
    )
    for name in ("zero", "shift") if is_read else ("scale", "zero", "shift"):
        of_blocks = getattr(decoder, name)
        if of_blocks is not None:
            factors = of_blocks(chunk, workspace).to(torch.float32, copy=True).contiguous()  # the buffer is reused
            setattr(side, name, factors.data_ptr())
            setattr(side, f"{name}_step", factors.shape[1] if factors.shape[0] > 1 else 0)
            alive.append(factors)
    if decoder.columns is not None and decoder.stored is not None:
        stored = workspace.read_whole("order", decoder.columns)
        columns = stored.clamp(0, decoder.stored.width - 1)  # the file may have changed since it was checked
        side.columns = columns.data_ptr()
        alive.append(columns)
    return side


def _place_scales(
    side: SideStruct,
    stored: StoredScales,
    chunk: Chunk,
    cols: int,
    workspace: Workspace,
    alive: list[object],
    keeps_scales: bool,
) -> bool:
    """Let the kernel read the scales of a chunk of whole rows from the file; return False if it cannot."""
    entry, height, width, turned, make_table, nested = stored
    chunk_rows, chunk_cols = chunk.shape
    if entry.file.descriptor < 0 or chunk_cols != cols or chunk.row % height:
        return False
    rows = -(-chunk_rows // height)
    if turned and rows * width < entry.n:
        return False
    n = (1 + turned) * rows * width  # turned scales need room as stored, and in order
    scales = torch.empty(n) if keeps_scales else workspace.buffer("read scales", (n,), torch.float32)
    side.scale, side.scale_height, side.scale_step = scales.data_ptr(), height, width if rows > 1 else 0
    side.scale_file = kernel_file(entry.file.descriptor)
    if make_table is None:
        side.scale_type = FLOATS[entry.dtype]
    else:
        table = make_table(workspace)
        side.scale_type, side.scale_table = ElementType.I8, table.data_ptr()
        alive.append(table)
    side.scale_n, side.scale_rows = rows * width, rows if turned else 0
    first = chunk.row // height * width
    side.scale_offset = entry.offset + first * entry.nbytes // entry.n
    if nested is not None:
        factors = workspace.read_whole("nested", nested.factors).clone()  # the buffer is reused
        side.nested, side.nested_n, side.nested_first = factors.data_ptr(), min(nested.n, entry.n), first
        side.nested_offset = nested.offset
        alive.append(factors)
    alive.append(scales)
    return True


def _place_columns(side: SideStruct, decoder: Decoder, chunk: Chunk, workspace: Workspace, alive: list[object]) -> None:
    """Point the operand to the codes of whole columns, held in memory, from the chunk's first row on."""
    stored = workspace.read_whole("columns", decoder.codes)
    if stored.nbytes <= MAX_COPIED_BYTES:
        stored = stored.clone()
    side.file, side.words = -1, stored.shape[1]
    first = chunk.row if decoder.order == Order.WORDS_DOWN else chunk.row // AWQ_ROWS
    side.stored = stored.data_ptr() + 4 * first
    if decoder.order == Order.AWQ_WORDS:
        side.row_bytes = decoder.cols  # one byte per code after reordering
    tile = workspace.buffer("tile", (TILE_ROWS * side.row_bytes,), torch.uint8)
    side.tile = tile.data_ptr()
    alive += (stored, tile)


def _place_shared_bytes(
    side: SideStruct, shared: SharedBytes, entry: Entry, chunk: Chunk, workspace: Workspace, alive: list[object]
) -> None:
    """Point the operand to rows of bytes, each with the codes of several rows."""
    side.first_row, side.shared_step, side.shared_rows = chunk.row, shared.step, len(shared.shifts)
    side.shifts[: len(shared.shifts)], side.largest_code = shared.shifts, (1 << shared.bits) - 1
    side.file, side.offset = kernel_file(entry.file.descriptor), entry.offset
    if side.file < 0 or workspace.fills(entry):
        read = partial(workspace.read_bytes, "native", entry, 0, (entry.nbytes,))
        room, side.file = workspace.cache("native", entry, "whole", read), -1
    else:
        room = workspace.buffer("native", (TILE_ROWS * side.row_bytes,), torch.uint8)
    tile = workspace.buffer("tile", (TILE_ROWS * side.row_bytes,), torch.uint8)
    side.stored, side.tile = room.data_ptr(), tile.data_ptr()
    alive += (room, tile)
