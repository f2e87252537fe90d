"""The common part of ggml's formats. Each tensor type is a format, whose weight is one stored tensor.

A row of the weight consists of whole blocks, and rows follow one another without padding. So, whatever the shape, a
chunk is a run of elements in a run of blocks: the blocks that cover it are unpacked and the rest is cut off. This also
holds for stacked experts and for tensors that ComfyUI-GGUF stores in another shape.

Values equal ggml's dequantize_row_… in float32, bit for bit: in each type all operations but the last are exact,
and the last rounds once. The modules of the family show this for each type.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c (dequantize_row_…), ggml/src/ggml-common.h
(block_…).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.checkpoints.ggml_types import OF_NAME, GgmlType
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Decoder, ElementType, Format, Parts, PartSpec, Weight
from quanterr.formats.shared.ggml_fields import IN_HEAD, Block, are_consecutive, decode, describe
from quanterr.kernel.levels import INT8, SUBNORMAL, Levels, ScaleSteps, uniform
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import Workspace

# The levels of 4-bit codes in all IQ4 types.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BlockType(NamedTuple):
    """One tensor type of ggml, and those that store the same numbers in another order."""

    summary: str
    usual_db: tuple[int, int]
    blocks: Mapping[str, Block]  # dtype → its block; the first gives the format its name
    ends: Levels | None = None  # levels if only some codes occur, or if codes are small floats
    codes: tuple[int, int] | None = None  # bytes that hold codes, of a block that is rewritten before it is decoded
    min_scale: float = SUBNORMAL

    @property
    def name(self) -> str:
        """The name of the type."""
        return next(iter(self.blocks))

    @property
    def format(self) -> str:
        """The name of the format."""
        return f"gguf_{self.name.lower()}"

    @property
    def bits(self) -> int:
        """The bits of one code and its sign, rounded."""
        numbers, layout, _ = self.blocks[self.name]
        codes, signs = (sum(f.kept_mask.bit_count() for f in fields) for fields in (layout.codes, layout.minus))
        return int(codes / numbers.width + signs / 8 + 0.5)

    @property
    def scale_elements(self) -> int:
        """The elements that share a scale; 0: the elements of a row."""
        numbers, layout, _ = self.blocks[self.name]
        return 0 if layout.d == IN_HEAD and not layout.scales else numbers.part

    def levels(self, dtype: str) -> Levels | None:
        """Return the levels of the codes; None if the nearest code does not depend on one element alone."""
        numbers, _, rewrite = self.blocks[dtype]
        if self.ends is not None or rewrite is not None or numbers.grid is not None:
            return self.ends
        table = numbers.levels
        if not table:
            return INT8
        return uniform(self.bits) if are_consecutive(table) else Levels(0x00, 0xFF, table[0], table[-1], table)

    @property
    def scale_steps(self) -> ScaleSteps | None:
        """The integers that scales of parts can be, before d multiplies them; None if they are no integers."""
        numbers, layout, _ = self.blocks[self.name]
        if numbers.grid is not None or not layout.scales or numbers.scale_levels:
            return None
        scales, minima = (sum(f.kept_mask.bit_count() for f in fields) for fields in (layout.scales, layout.minima))
        scales += len(layout.signs)
        half = bool(numbers.signed or numbers.offset)  # half of the numbers are negative
        shared = 0 if layout.d == IN_HEAD else OF_NAME[self.name].elements // numbers.part
        return ScaleSteps(shared, (1 << scales - half) - 1, (1 << minima) - 1)


def make_block_formats(types: Iterable[BlockType]) -> tuple[Format, ...]:
    """Return a row of FORMATS for each type."""
    return tuple(
        Format(
            block_type.format,
            {"codes": PartSpec(("{weight}",), frozenset(block_type.blocks))},
            partial(fit, block_type),
            summary=block_type.summary,
            usual_db=block_type.usual_db,
            min_scale=block_type.min_scale,
        )
        for block_type in types
    )


def fit(block_type: BlockType, parts: Parts) -> Weight:
    """Return a weight of any shape; the file reader has checked that rows are whole blocks."""
    if parts.hints.labels:
        raise FormatMismatch(f"{parts.hints.labels[0]}, but the codes are {block_type.name}")
    block, ggml_type = block_type.blocks[parts.codes.dtype], OF_NAME[parts.codes.dtype]
    cols = parts.codes.shape[-1] if parts.codes.shape else 1
    of_group = (
        ggml_type.rows * ggml_type.head,
        ggml_type.rows * (ggml_type.head + cols // ggml_type.elements * ggml_type.n_bytes),
    )
    shared, steps, levels = block_type.scale_elements or cols, block_type.scale_steps, block_type.levels(ggml_type.name)
    span = block_type.codes or block.layout.span
    return parts.weight(
        parts.codes.shape,
        make_decoder(parts, block, ggml_type),
        block_size=(1, shared),
        code_bits=block_type.bits,
        uniform_bits=block_type.bits if block_type.bits > 1 and levels in (INT8, uniform(block_type.bits)) else None,
        levels=levels and levels.in_blocks(ggml_type.rows * ggml_type.n_bytes, span, of_group),
        scale_steps=steps and steps._replace(shared=steps.shared or cols // shared),
        evidence=(f"type {ggml_type.name}: blocks of {ggml_type.elements} elements in {ggml_type.n_bytes} bytes",),
    )


def make_decoder(parts: Parts, block: Block, ggml_type: GgmlType) -> Decoder:
    """Return the decoder of blocks: for some types, the compiled kernel has special functions."""
    entry, cols, read = parts.codes, parts.matrix[1], partial(read_blocks, parts.codes, block)
    are_rows = not (ggml_type.head or ggml_type.rows > 1) or cols == entry.shape[-1]
    if block.rewrite or not are_rows:
        return Decoder(entry, cols, read=read)
    element, grid = ElementType.__members__.get(ggml_type.name), block.numbers.grid
    described = None if element else describe(block, ggml_type)
    return Decoder(entry, cols, element or ElementType.BLOCKS, grid=grid, blocks=described, read=read)


def read_blocks(entry: Entry, block: Block, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the elements of a chunk, (r, c) float32.

    A part of one row is cut from the blocks of its group of rows that cover it, and several rows from whole groups.
    Without heads and interleaved rows, the whole weight is one row.
    """
    ggml_type = OF_NAME[entry.dtype]
    cols = entry.shape[-1] if ggml_type.head or ggml_type.rows > 1 else entry.n
    begin = chunk.row * as_matrix(entry.shape)[1] + chunk.col
    row, last = begin // cols, (begin + chunk.n - 1) // cols
    group, groups = row // ggml_type.rows, last // ggml_type.rows - row // ggml_type.rows + 1
    first, blocks = 0, cols // ggml_type.elements
    if row == last:
        first = begin % cols // ggml_type.elements
        blocks = (begin % cols + chunk.n - 1) // ggml_type.elements - first + 1
    heads, size = ggml_type.rows * ggml_type.head, ggml_type.rows * ggml_type.n_bytes
    group_bytes = heads + cols // ggml_type.elements * size
    begins = group * group_bytes
    if groups > 1 or blocks == cols // ggml_type.elements:
        raw = workspace.read_bytes("blocks", entry, begins, (groups, group_bytes))
        head, raw = raw[:, :heads], raw[:, heads:]
    else:
        raw = workspace.read_bytes("blocks", entry, begins + heads + first * size, (1, blocks * size))
        head = workspace.read_bytes("heads", entry, begins, (1, heads)) if heads else raw
    raw = raw.as_strided((groups, blocks, size), (raw.stride(0), size, 1))
    values = decode(block, ggml_type, raw, _read_heads(head, ggml_type) if heads else None)
    inside = (row % ggml_type.rows * blocks - first) * ggml_type.elements + begin % cols
    return values.reshape(-1)[inside : inside + chunk.n].view(chunk.shape)


def _read_heads(raw: Tensor, ggml_type: GgmlType) -> Tensor:
    """Return the scale at the beginning of each row's head, float32 (groups, rows, 1)."""
    floats = raw.reshape(-1).view(torch.float16 if ggml_type.head == 2 else torch.float32).float()
    return floats.view(len(raw), ggml_type.rows, -1)[:, :, :1]
