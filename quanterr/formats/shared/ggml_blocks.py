"""The formats of ggml: what their rows share. Each tensor type is a format, whose weight is one stored tensor.

A row of the weight is whole blocks, and rows follow each other without padding, so that any chunk is a run of
elements in a run of blocks, whatever the shape is: the blocks that cover it are unpacked, the rest is cut off.
That holds as well for stacked experts and for the tensors that ComfyUI-GGUF stores in another shape.

Values are those of ggml's dequantize_row_… in float32, bit for bit: all products of a type but the last
operation are exact, and that one rounds once. The files of the family say so of each type.

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
from quanterr.formats.base import Decoder, Dequantize, Element, Format, Native, Part, Parts, Values, Weight
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.levels import INT8, SUBNORMAL, Levels, ScaleSteps, uniform
from quanterr.tensors.workspace import Workspace

# Writes the elements of blocks, uint8 (n, bytes of a block), to the second, float32 (n, elements of a block).
Unpack = Callable[[Tensor, Tensor, Workspace], None]


class Layout(NamedTuple):
    """One tensor type."""

    dtype: str
    summary: str
    unpack: Unpack
    shared: int  # elements that share a scale
    bits: int  # of one code, rounded up
    usual_db: tuple[int, int]
    codes: tuple[int, int] = (0, 0)  # the bytes of a block that hold them
    levels: Levels | None = None  # of the codes
    uniform: bool = False  # the codes have equal steps, and no sign
    element: Element | None = None  # what the compiled kernel decodes itself
    least_scale: float = SUBNORMAL
    scale_steps: ScaleSteps | None = None  # where a block has scales of its parts beside its own

    @property
    def format(self) -> str:
        """The name of the format."""
        return f"gguf_{self.dtype.lower()}"


def block_formats(layouts: Iterable[Layout]) -> tuple[Format, ...]:
    """A row for each type."""
    return tuple(
        Format(
            layout.format,
            {"codes": Part(("{weight}",), frozenset({layout.dtype}))},
            partial(fit, layout),
            summary=layout.summary,
            usual_db=layout.usual_db,
            least_scale=layout.least_scale,
        )
        for layout in layouts
    )


def fit(layout: Layout, parts: Parts) -> Weight:
    """Any shape fits: the file's reader has seen to it that rows are whole blocks."""
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but the codes are {layout.dtype}")
    n, n_bytes = BLOCKS[layout.dtype]
    levels = uniform(layout.bits) if layout.uniform else layout.levels
    return parts.weight(
        parts.codes.shape,
        _native(parts, layout),
        block_size=(1, layout.shared),
        code_bits=layout.bits,
        uniform_bits=layout.bits if layout.uniform or levels is INT8 else None,
        levels=levels and levels.within(n_bytes, layout.codes),
        scale_steps=layout.scale_steps,
        evidence=(f"type {layout.dtype}: blocks of {n} elements in {n_bytes} bytes",),
    )


def _native(parts: Parts, layout: Layout) -> Dequantize:
    plain, cols = partial(dequantize, parts, layout.unpack), parts.matrix[1]
    return Native(plain, Decoder(parts.codes, cols, layout.element)) if layout.element is not None else plain


def dequantize(parts: Parts, unpack: Unpack, chunk: Chunk, workspace: Workspace) -> Values:
    """The elements of a chunk, (r, c)."""
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


def half(raw: Tensor, at: int) -> Tensor:
    """The float16 at that byte of each block as float32, (n, 1)."""
    return raw[:, at : at + 2].view(torch.float16).float()


def nibbles(raw: Tensor, first: int, last: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """The lower and the upper halves of the bytes ``first:last`` of each block, uint8 (n, last - first)."""
    shape = tuple(raw.shape)  # whole blocks: to work on memory without gaps is faster than to leave some out
    low = torch.bitwise_and(raw, 15, out=workspace.buffer("low", shape, torch.uint8))
    high = torch.bitwise_right_shift(raw, 4, out=workspace.buffer("high", shape, torch.uint8))
    return low[:, first:last], high[:, first:last]


def fields(raw: Tensor, first: int, last: int, bits: int, workspace: Workspace) -> Iterator[Tensor]:
    """The fields of this many bits in the bytes ``first:last`` of each block, lowest first: uint8 (n, last - first).

    Each is a buffer of the workspace and holds until the next one.
    """
    shape = raw.shape[0], last - first
    packed = workspace.buffer("packed", shape, torch.uint8).copy_(raw[:, first:last])
    field = workspace.buffer("field", shape, torch.uint8)
    for shift in range(0, 8, bits):
        yield torch.bitwise_right_shift(packed, shift, out=field).bitwise_and_((1 << bits) - 1)


def codes_of(workspace: Workspace, *shape: int) -> Tensor:
    """The buffer for codes, uint8."""
    return workspace.buffer("codes", shape, torch.uint8)


def look_up(table: Tensor, index: Tensor, key: str, workspace: Workspace) -> Tensor:
    """Entries of a 1-D table by integer index, of the shape of the index, as a buffer named ``key``.

    Where the entries are integers of several bytes they stand for as many codes: see :func:`as_integers`.
    """
    if index.dtype != torch.int32:
        index = workspace.buffer("places", tuple(index.shape), torch.int32).copy_(index)
    found = workspace.buffer(key, (index.numel(),), table.dtype)
    return torch.index_select(table, 0, index.reshape(-1), out=found).view(index.shape)


def as_integers(rows: Tensor) -> Tensor:
    """Rows of 2, 4 or 8 bytes, int8 (entries, bytes), as one integer each: (entries,)."""
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.shape[1]]
    return rows.contiguous().view(dtype).view(-1)


@cache
def bits_of_bytes(zero: int, one: int, device: torch.device) -> Tensor:
    """For each byte eight int8 in an int64, one for each bit, the lowest first: ``zero`` or ``one``. (256,)"""
    byte = torch.arange(256)[:, None] >> torch.arange(8)
    return as_integers(torch.where(byte % 2 == 1, one, zero).to(torch.int8)).to(device)
