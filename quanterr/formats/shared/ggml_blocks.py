"""The common part of ggml's formats. Each tensor type is a format, whose weight is one stored tensor.

A row of the weight consists of whole blocks, and rows follow one another without padding. So, whatever the shape, a
chunk is a run of elements in a run of blocks: the blocks that cover it are unpacked and the rest is cut off. This also
holds for stacked experts and for tensors that ComfyUI-GGUF stores in another shape.

Values equal ggml's dequantize_row_… in float32, bit for bit: in each type all operations but the last are exact,
and the last rounds once. The modules of the family show this for each type.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c (dequantize_row_…), ggml/src/ggml-common.h
(block_…).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, Dequantize, ElementType, Format, Native, Parts, PartSpec, Values, Weight
from quanterr.kernel.levels import INT8, SUBNORMAL, Levels, ScaleSteps, uniform
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace

# Unpacks blocks, uint8 (n, bytes of a block), into the second argument, float32 (n, elements of a block).
Unpack = Callable[[Tensor, Tensor, Workspace], None]


class BlockType(NamedTuple):
    """One tensor type of ggml."""

    dtype: str
    summary: str
    unpack: Unpack
    shared: int  # elements that share a scale
    bits: int  # bits of one code, rounded up
    usual_db: tuple[int, int]
    codes: tuple[int, int] = (0, 0)  # range of the block's bytes that hold codes
    levels: Levels | None = None  # levels of the codes
    uniform: bool = False  # the codes are unsigned with equal steps
    table: Callable[[], Tensor] | None = None  # makes the levels of each index, for the compiled kernel
    least_scale: float = SUBNORMAL
    scale_steps: ScaleSteps | None = None  # set if parts of a block have scales besides the block's own

    @property
    def format(self) -> str:
        """The name of the format."""
        return f"gguf_{self.dtype.lower()}"


def block_formats(layouts: Iterable[BlockType]) -> tuple[Format, ...]:
    """Return a row of FORMATS for each type."""
    return tuple(
        Format(
            layout.format,
            {"codes": PartSpec(("{weight}",), frozenset({layout.dtype}))},
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
    n, n_bytes = BLOCKS[layout.dtype]
    levels = uniform(layout.bits) if layout.uniform else layout.levels
    return parts.weight(
        parts.codes.shape,
        _attach_decoder(parts, layout),
        block_size=(1, layout.shared),
        code_bits=layout.bits,
        uniform_bits=layout.bits if layout.uniform or levels is INT8 else None,
        levels=levels and levels.in_blocks(n_bytes, layout.codes),
        scale_steps=layout.scale_steps,
        evidence=(f"type {layout.dtype}: blocks of {n} elements in {n_bytes} bytes",),
    )


def _attach_decoder(parts: Parts, layout: BlockType) -> Dequantize:
    plain = partial(dequantize, parts, layout.unpack)
    element = ElementType.__members__.get(layout.dtype)  # the compiled kernel decodes most blocks itself
    if element is None:
        return plain
    return Native(plain, Decoder(parts.codes, parts.matrix[1], element, layout.table and layout.table()))


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
