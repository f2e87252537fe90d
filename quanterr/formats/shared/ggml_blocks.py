"""The common part of ggml's formats. Each tensor type is a format, whose weight is one stored tensor.

A row of the weight consists of whole blocks, and rows follow one another without padding. So, whatever the shape, a
chunk is a run of elements in a run of blocks: the blocks that cover it are unpacked and the rest is cut off. This also
holds for stacked experts and for tensors that ComfyUI-GGUF stores in another shape.

Values equal ggml's dequantize_row_… in float32, bit for bit: in each type all operations but the last are exact,
and the last rounds once. The modules of the family show this for each type.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c (dequantize_row_…), ggml/src/ggml-common.h
(block_…).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints.ggml_types import BLOCKS, OF_NAME, GgmlType
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, Dequantize, ElementType, Format, Native, Parts, PartSpec, Values, Weight
from quanterr.kernel.levels import INT8, SUBNORMAL, Levels, ScaleSteps, uniform
from quanterr.kernel.structs import BlocksStruct
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# The levels of 4-bit codes in all IQ4 types.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Unpacks blocks, uint8 (n, bytes of a block), into the second argument, float32 (n, elements of a block).
Unpack = Callable[[Tensor, Tensor, Workspace], None]
# Unpacks blocks of interleaved rows, uint8 (groups, blocks, bytes), with the rows' heads, float32 (groups, rows, 1) or
# None, into the third argument, float32 (groups, rows, blocks, elements).
UnpackRows = Callable[[Tensor, Tensor | None, Tensor, Workspace], None]


class StoredRows(NamedTuple):
    """The storage of rows that have heads or are interleaved."""

    unpack: UnpackRows
    codes: tuple[int, int] = (0, 0)  # range of the bytes of interleaved blocks that hold codes
    blocks: Callable[[GgmlType], BlocksStruct] | None = None  # makes their description for the compiled kernel


class BlockType(NamedTuple):
    """One tensor type of ggml, and those that store the same numbers in another order."""

    dtype: str
    summary: str
    unpack: Unpack | None
    shared: int  # elements that share a scale; 0: the elements of a row
    bits: int  # bits of one code, rounded up
    usual_db: tuple[int, int]
    codes: tuple[int, int] = (0, 0)  # range of the block's bytes that hold codes
    levels: Levels | None = None  # levels of the codes
    uniform: bool = False  # the codes are unsigned with equal steps
    table: Callable[[], Tensor] | None = None  # makes the levels of each index, for the compiled kernel
    least_scale: float = SUBNORMAL
    scale_steps: ScaleSteps | None = None  # set if parts of a block have their own scales
    rows: Mapping[str, StoredRows] = {}  # by dtype

    @property
    def format(self) -> str:
        """The name of the format."""
        return f"gguf_{self.dtype.lower()}"


def block_formats(layouts: Iterable[BlockType]) -> tuple[Format, ...]:
    """Return a row of FORMATS for each type."""
    return tuple(
        Format(
            layout.format,
            {"codes": PartSpec(("{weight}",), frozenset({layout.dtype, *layout.rows}))},
            partial(fit, layout),
            summary=layout.summary,
            usual_db=layout.usual_db,
            least_scale=layout.least_scale,
        )
        for layout in layouts
    )


def fit(layout: BlockType, parts: Parts) -> Weight:
    """Return a weight of any shape; the file reader has checked that rows are whole blocks."""
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but the codes are {layout.dtype}")
    kind, rows = OF_NAME[parts.codes.dtype], layout.rows.get(parts.codes.dtype)
    cols = parts.codes.shape[-1] if parts.codes.shape else 1
    of_group = kind.rows * kind.head, kind.rows * (kind.head + cols // kind.elements * kind.n_bytes)
    shared = layout.shared or cols
    steps = layout.scale_steps
    levels = uniform(layout.bits) if layout.uniform else layout.levels
    return parts.weight(
        parts.codes.shape,
        _attach_decoder(parts, layout) if rows is None else _decode_rows(parts, rows),
        block_size=(1, shared),
        code_bits=layout.bits,
        uniform_bits=layout.bits if layout.uniform or levels is INT8 else None,
        levels=levels and levels.in_blocks(kind.rows * kind.n_bytes, rows.codes if rows else layout.codes, of_group),
        scale_steps=steps and steps._replace(shared=steps.shared or cols // shared),
        evidence=(f"type {kind.name}: blocks of {kind.elements} elements in {kind.n_bytes} bytes",),
    )


def _attach_decoder(parts: Parts, layout: BlockType) -> Dequantize:
    if layout.unpack is None:
        raise AssertionError(f"{layout.dtype} is not stored in rows")
    plain = partial(dequantize, parts, layout.unpack)
    element = ElementType.__members__.get(layout.dtype)  # the compiled kernel decodes most blocks itself
    if element is None:
        return plain
    return Native(plain, Decoder(parts.codes, parts.matrix[1], element, layout.table and layout.table()))


def _decode_rows(parts: Parts, rows: StoredRows) -> Dequantize:
    entry, kind = parts.codes, OF_NAME[parts.codes.dtype]
    plain = partial(dequantize_rows, parts, rows.unpack)
    are_rows = not (kind.head or kind.rows > 1) or parts.matrix[1] == entry.shape[-1]
    if rows.blocks is None or not are_rows:
        return plain
    return Native(plain, Decoder(entry, parts.matrix[1], ElementType.BLOCKS, blocks=rows.blocks(kind)))


def dequantize(parts: Parts, unpack: Unpack, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the elements of a chunk, (r, c)."""
    entry = parts.codes
    per_block, block_bytes = BLOCKS[entry.dtype]
    begin = chunk.row * parts.matrix[1] + chunk.col
    first = begin // per_block
    n = -(-(begin + chunk.n) // per_block) - first
    raw = workspace.read_bytes("blocks", entry, first * block_bytes, (n, block_bytes))
    values = workspace.output((n, per_block))
    unpack(raw, values, workspace)
    inside = begin - first * per_block
    return Values(values.view(-1)[inside : inside + chunk.n].view(chunk.shape))


def dequantize_rows(parts: Parts, unpack: UnpackRows, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the elements of a chunk, (r, c), of a type whose rows have heads or are interleaved.

    A piece of one row is cut from the blocks of its group of rows that cover it, and several rows from whole groups.
    """
    entry = parts.codes
    kind = OF_NAME[entry.dtype]
    cols = entry.shape[-1] if kind.head or kind.rows > 1 else entry.n
    begin = chunk.row * parts.matrix[1] + chunk.col
    row, last = begin // cols, (begin + chunk.n - 1) // cols
    group, groups = row // kind.rows, last // kind.rows - row // kind.rows + 1
    first, blocks = 0, cols // kind.elements
    if row == last:
        first = begin % cols // kind.elements
        blocks = (begin % cols + chunk.n - 1) // kind.elements - first + 1
    heads, size = kind.rows * kind.head, kind.rows * kind.n_bytes
    group_bytes = heads + cols // kind.elements * size
    begins = group * group_bytes
    if groups > 1 or blocks == cols // kind.elements:
        raw = workspace.read_bytes("blocks", entry, begins, (groups, group_bytes))
        head, raw = raw[:, :heads], raw[:, heads:]
    else:
        raw = workspace.read_bytes("blocks", entry, begins + heads + first * size, (1, blocks * size))
        head = workspace.read_bytes("heads", entry, begins, (1, heads)) if heads else raw
    values = workspace.output((groups, kind.rows, blocks, kind.elements))
    raw = raw.as_strided((groups, blocks, size), (raw.stride(0), size, 1))
    unpack(raw, _read_heads(head, kind) if heads else None, values, workspace)
    inside = (row % kind.rows * blocks - first) * kind.elements + begin % cols
    return Values(values.view(-1)[inside : inside + chunk.n].view(chunk.shape))


def _read_heads(raw: Tensor, kind: GgmlType) -> Tensor:
    """Return the scale at the beginning of each row's head, float32 (groups, rows, 1)."""
    floats = raw.reshape(-1).view(torch.float16 if kind.head == 2 else torch.float32).float()
    return floats.view(len(raw), kind.rows, -1)[:, :, :1]


def read_half(raw: Tensor, at: int) -> Tensor:
    """Read the float16 at byte ``at`` of each block as float32, (n, 1)."""
    return raw[:, at : at + 2].view(torch.float16).float()


def split_nibbles(raw: Tensor, first: int, last: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Return the low and the high nibbles of bytes ``first:last`` of each block, uint8 (n, last - first)."""
    shape = tuple(raw.shape)  # whole blocks, as contiguous memory is faster than skipping bytes
    low = torch.bitwise_and(raw, 15, out=workspace.buffer("low", shape, torch.uint8))
    high = torch.bitwise_right_shift(raw, 4, out=workspace.buffer("high", shape, torch.uint8))
    return low[:, first:last], high[:, first:last]


def split_fields(raw: Tensor, first: int, last: int, bits: int, workspace: Workspace) -> Iterator[Tensor]:
    """Yield the ``bits``-wide fields of bytes ``first:last`` of each block, lowest first: uint8 (n, last - first).

    Each field is a buffer of the workspace and is valid until the next one.
    """
    shape = raw.shape[0], last - first
    packed = workspace.buffer("packed", shape, torch.uint8).copy_(raw[:, first:last])
    field = workspace.buffer("field", shape, torch.uint8)
    for shift in range(0, 8, bits):
        yield torch.bitwise_right_shift(packed, shift, out=field).bitwise_and_((1 << bits) - 1)


def code_buffer(workspace: Workspace, *shape: int) -> Tensor:
    """Return the buffer for codes, uint8."""
    return workspace.buffer("codes", shape, torch.uint8)


def look_up(table: Tensor, index: Tensor, key: str, workspace: Workspace) -> Tensor:
    """Look up entries of a 1-D table by integer index; return them in the shape of the index, in buffer ``key``.

    An entry of several bytes packs one code per byte: see :func:`pack_integers`.
    """
    if index.dtype != torch.int32:
        index = workspace.buffer("places", tuple(index.shape), torch.int32).copy_(index)
    found = workspace.buffer(key, (index.numel(),), table.dtype)
    return torch.index_select(table, 0, index.reshape(-1), out=found).view(index.shape)


def pack_integers(rows: Tensor) -> Tensor:
    """View rows of 2, 4 or 8 bytes, int8 (entries, bytes), as one integer each: (entries,)."""
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.shape[1]]
    return rows.contiguous().view(dtype).view(-1)


@cache
def expand_bits(zero: int, one: int, device: torch.device) -> Tensor:
    """Return the bits of each byte as int8 ``zero`` or ``one``, lowest first, packed in an int64: (256,)."""
    byte = torch.arange(256)[:, None] >> torch.arange(8)
    return pack_integers(torch.where(byte % 2 == 1, one, zero).to(torch.int8)).to(device)
