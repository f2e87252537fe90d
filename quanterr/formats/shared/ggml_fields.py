"""Blocks of ggml as data: where the bits of each number are. For types whose rows have heads or are interleaved.

A :class:`Field` is a number of a few bits for each element, or for each part of a block that shares a scale, in a run
of bytes. ``where`` gives the place, from the highest bit to the lowest: the bits of the byte's index in the run, then
after a colon the bits of the field's index in its byte:

    0 to 7    this bit of the element's index in the block
    k         the next bit of the row's index among interleaved rows, the highest first
    L, H      always 0, always 1

So fields of 4 bits at "7653210:4" are the codes of 256 elements in 128 bytes: byte 16 a + j holds elements 32 a + j and
32 a + 16 + j. At "76524kk10:3", the codes of four rows are interleaved by words of 32 bits.

Reference: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/ggml-common.h (block_…), ggml/src/iqk/iqk_quantize.cpp
(dequantize_row_…).
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints.ggml_types import GgmlType
from quanterr.formats.shared.ggml_blocks import StoredRows
from quanterr.kernel.structs import BlocksStruct
from quanterr.tensors.workspace import Workspace

IN_HEAD = -1  # instead of the place of d: before the blocks of the row


class Field(NamedTuple):
    """Some bits of a number: see the module's docstring."""

    at: int  # first byte of the run in the block
    where: str
    bits: int = 8  # bits of a field
    up: int = 0  # place of these bits in the number
    mask: int = 0xFF  # mask of the field

    @property
    def n_bytes(self) -> int:
        """The length of the run."""
        return 1 << len(self.where.partition(":")[0])


class Layout(NamedTuple):
    """The places where a type stores its numbers; several fields of one number are added."""

    codes: tuple[Field, ...]
    scales: tuple[Field, ...] = ()
    flags: tuple[Field, ...] = ()  # 1: the part's levels are shifted
    signs: tuple[Field, ...] = ()  # 1: the part's scale is negative
    minima: tuple[Field, ...] = ()
    d: int = 0  # place of the rows' d, float16, in the block; or IN_HEAD
    d_minima: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of a block that hold codes and nothing else."""
        return min(field.at for field in self.codes), max(field.at + field.n_bytes for field in self.codes)


class Numbers(NamedTuple):
    """The meaning of a type's numbers.

    A part of ``part`` elements has the scale d · (``factor`` · s + ``offset``). An element is this scale times its
    level, less d_minima · m. Each operation rounds to float32; if d is float16, all but the last are exact.
    """

    levels: tuple[float, ...]  # levels of the codes, if there are 256 consecutive ones; empty: signed bytes
    part: int
    factor: int = 1
    offset: int = 0
    shift: float = 0.0  # shift of the levels of a part with a flag
    signed: bool = False  # scales are signed bytes
    width: int = 1  # elements of a code, 1 or 2, whose levels follow one another


def decode(
    numbers: Numbers, layout: Layout, raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace
) -> None:
    """Dequantize blocks of interleaved rows.

    ``raw`` is uint8 (groups, blocks, bytes), ``heads`` float32 (groups, rows, 1), and ``out`` float32 (groups, rows,
    blocks, elements).
    """
    groups, rows, blocks, elements = out.shape
    write_levels(numbers, layout, raw, out, workspace)
    of_parts = range(elements.bit_length() - 2, numbers.part.bit_length() - 2, -1)
    parts = out.view(groups, rows, blocks, -1, min(numbers.part, elements))
    d = heads if layout.d == IN_HEAD and heads is not None else read_halves(raw, layout.d, rows)
    units = d.unsqueeze(3)
    if layout.scales:
        scales = gather(layout.scales, raw, rows, of_parts, "scales", workspace)
        scales = (scales.view(torch.int8) if numbers.signed else scales).to(torch.int16)
        scales.mul_(numbers.factor).add_(numbers.offset)
        if layout.signs:
            scales.mul_(1 - 2 * gather(layout.signs, raw, rows, of_parts, "signs", workspace).to(torch.int16))
        units = units * scales
    if layout.flags:
        parts.add_(gather(layout.flags, raw, rows, of_parts, "flags", workspace).unsqueeze(4) * numbers.shift)
    parts.mul_(units.unsqueeze(4))
    if layout.minima:
        minima = gather(layout.minima, raw, rows, of_parts, "minima", workspace)
        parts.sub_((read_halves(raw, layout.d_minima, rows).unsqueeze(3) * minima).unsqueeze(4))


def write_levels(numbers: Numbers, layout: Layout, raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Write the level of each element to ``out``: see :func:`decode`."""
    bits = range(out.shape[3].bit_length() - 2, numbers.width - 2, -1)
    codes = gather(layout.codes, raw, out.shape[1], bits, "codes", workspace)
    if len(numbers.levels) == 256:  # consecutive
        out.copy_(codes).add_(numbers.levels[0])
    elif numbers.levels:
        pairs = codes.view(torch.int16) if numbers.width == 1 else codes
        places = workspace.buffer("places", (out.numel() // 2,), torch.int32).copy_(pairs.view(-1))
        table = _make_pairs(numbers.levels, numbers.width, raw.device)
        torch.index_select(table, 0, places, out=out.view(-1).view(torch.int64))
    else:
        out.copy_(codes.view(torch.int8))


def gather(
    fields: Sequence[Field], raw: Tensor, rows: int, bits: Sequence[int], key: str, workspace: Workspace
) -> Tensor:
    """Return the numbers of fields, uint8 (groups, rows, blocks, 2 ** bits), for these bits of an element's index."""
    groups, blocks, _ = raw.shape
    of_row = rows.bit_length() - 1
    numbers = workspace.buffer(key, (groups, rows, blocks, 1 << len(bits)), torch.uint8)
    axes = numbers.view(groups, *[2] * of_row, blocks, *[2] * len(bits))
    for first, field in enumerate(fields):
        address, within = _find_axes(field.where, of_row, tuple(bits))
        target = axes.permute(0, 1 + of_row, *(axis for axis in (*address, *within) if axis > 0))
        stored = raw[:, :, field.at : field.at + field.n_bytes].contiguous()
        for part in range(1 << len(within)):
            digits = [part >> shift & 1 for shift in reversed(range(len(within)))]
            if any(axis <= 0 and digit != -axis for axis, digit in zip(within, digits, strict=True)):
                continue
            found = (stored >> part * field.bits) & (field.mask & (1 << field.bits) - 1)
            found = found.bitwise_left_shift_(field.up).view(groups, blocks, *[2] * len(address))
            for place in reversed(range(len(address))):
                found = found.select(2 + place, -address[place]) if address[place] <= 0 else found
            here = target
            for axis, digit in zip(reversed(within), reversed(digits), strict=True):
                here = here.select(-1, digit) if axis > 0 else here
            if first:
                here.bitwise_or_(found)
            else:
                here.copy_(found)
    return numbers


@cache
def _find_axes(where: str, of_row: int, bits: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the axes in :func:`gather` of the byte's index and of the place in the byte; 0 or -1 for L and H."""
    of_rows = iter(range(1, 1 + of_row))
    elements = {str(bit): 2 + of_row + number for number, bit in enumerate(bits)} | {"L": 0, "H": -1}
    address, _, within = where.partition(":")
    found = [[next(of_rows) if sign == "k" else elements[sign] for sign in part] for part in (address, within)]
    return found[0], found[1]


def read_halves(raw: Tensor, at: int, rows: int) -> Tensor:
    """Read a float16 of each row from byte ``at`` of each block on, float32 (groups, rows, blocks)."""
    found = raw[:, :, at : at + 2 * rows].reshape(-1).view(torch.float16)
    return found.float().view(*raw.shape[:2], rows).transpose(1, 2)


@cache
def _make_pairs(levels: tuple[float, ...], width: int, device: torch.device) -> Tensor:
    """Return the levels of two elements, float32 as one int64: by their code, or by a number of two bytes of codes."""
    pairs = torch.tensor(levels, dtype=torch.float32).view(-1, width)
    if width == 1:
        most = len(levels) - 1
        number = torch.arange(most * 257 + 1)
        pairs = torch.cat([pairs[(number & 255).clamp(max=most)], pairs[number >> 8]], 1)
    return pairs.view(torch.int64).view(-1).to(device)


def store_rows(numbers: Numbers, layouts: Mapping[str, Layout]) -> dict[str, StoredRows]:
    """Return how the types with these layouts store the same numbers."""
    return {
        dtype: StoredRows(
            partial(decode, numbers, layout),
            layout.span,
            partial(_describe_blocks, numbers, layout) if numbers.width == 1 else None,
        )
        for dtype, layout in layouts.items()
    }


@cache
def _describe_blocks(numbers: Numbers, layout: Layout, kind: GgmlType) -> BlocksStruct:
    """Describe blocks for the compiled kernel."""
    run = min(1 << _count_last(field.where) for field in layout.codes)
    levels = (ctypes.c_float * len(numbers.levels))(*numbers.levels)
    found = BlocksStruct(
        elements=kind.elements,
        n_bytes=kind.n_bytes,
        head=kind.head,
        rows=kind.rows,
        run=run,
        part=numbers.part,
        d=layout.d,
        d_minima=layout.d_minima,
        factor=numbers.factor,
        offset=numbers.offset,
        are_signed=numbers.signed,
        shift=numbers.shift,
        levels=ctypes.addressof(levels) if numbers.levels else None,
    )
    found.alive = [levels]  # its pointers refer to these
    for name in ("codes", "scales", "flags", "signs", "minima"):
        step = run if name == "codes" else numbers.part
        for bits, field in zip(getattr(found, name), getattr(layout, name), strict=False):
            places = [
                _find_place(field, row, kind.rows, first)
                for row in range(kind.rows)
                for first in range(0, kind.elements, step)
            ]
            at = (ctypes.c_uint16 * len(places))(*(byte for byte, _ in places))
            shift = (ctypes.c_uint8 * len(places))(*(lowest for _, lowest in places))
            bits.at, bits.shift = ctypes.addressof(at), ctypes.addressof(shift)
            bits.mask, bits.up = field.mask & (1 << field.bits) - 1, field.up
            found.alive += [at, shift]
    return found


def _count_last(where: str) -> int:
    """Return how many of an element's lowest bits, up to four, are the lowest of the byte's index."""
    address = where.partition(":")[0]
    return next(n for n in (4, 3, 2) if address.endswith("3210"[-n:]))


def _find_place(field: Field, row: int, rows: int, element: int) -> tuple[int, int]:
    """Return the byte of an element in its block, and the lowest bit."""
    of_row = iter(range(rows.bit_length() - 2, -1, -1))
    address, _, within = field.where.partition(":")
    numbers = []
    for signs in (address, within):
        bits = [
            row >> next(of_row) & 1 if sign == "k" else element >> int(sign) & 1 if sign.isdigit() else int(sign == "H")
            for sign in signs
        ]
        numbers.append(sum(bit << place for place, bit in enumerate(reversed(bits))))
    return field.at + numbers[0], numbers[1] * field.bits
