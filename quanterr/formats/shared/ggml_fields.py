"""Blocks of ggml as data: where the bits of each number are, and what the numbers mean.

A :class:`Field` is a number of a few bits for each element, or for each run of elements that shares the number, in a
run of words. ``where`` gives the place, from the highest bit to the lowest: the bits of the word's index in the run,
then after a colon the bits of the field's index in its word:

    0 to 7    this bit of the element's index in the block
    k         the next bit of the row's index among interleaved rows, the highest first
    L         always 0

So fields of 4 bits at "7653210:4" are the codes of 256 elements in 128 bytes: byte 16 a + j holds elements 32 a + j and
32 a + 16 + j. At "76524kk10:3", the codes of four rows are interleaved by words of 32 bits.

:func:`decode` specifies the values. The compiled kernel reads the same data: :func:`describe`.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c (dequantize_row_…), ggml/src/ggml-common.h
(block_…); ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp (dequantize_row_…).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from quanterr.checkpoints.ggml_types import GgmlType
from quanterr.kernel.structs import BlocksStruct
from quanterr.lazy_torch import Tensor, torch

IN_HEAD = -1  # instead of the place of d: d is stored before the blocks of the row
SIGNS = 8  # number of elements whose signs are stored as one number
MIN_LEVELS = 16  # minimum number of levels that the kernel reads
BYTE_BITS, WORD_BITS = 8, 32


class Field(NamedTuple):
    """Some bits of a number: see the module's docstring."""

    at: int  # first byte of the run in the block
    where: str
    bits: int = 8  # number of bits from one field to the next in a word
    up: int = 0  # place of these bits in the number
    mask: int = -1  # the bits of the field that count
    word: int = 8  # bits of a word
    first: int = 0  # lowest bit of the first field in its word

    @property
    def kept_mask(self) -> int:
        """The mask of the bits that count."""
        return self.mask & (1 << self.bits) - 1

    @property
    def stop(self) -> int:
        """The byte after the run."""
        return self.at + (self.word << len(self.where.partition(":")[0])) // 8

    def find_bit(self, element: int, row: int, rows: int) -> int:
        """Return the number of the field's lowest bit in the block, for an element of one of ``rows`` rows."""
        of_row = iter(range(rows.bit_length() - 2, -1, -1))
        address, _, within = self.where.partition(":")
        word, field = (
            sum(
                (row >> next(of_row) if sign == "k" else 0 if sign == "L" else element >> int(sign)) % 2 << place
                for place, sign in zip(reversed(range(len(signs))), signs, strict=True)
            )
            for signs in (address, within)
        )
        return 8 * self.at + word * self.word + self.first + field * self.bits


Fields = tuple[Field, ...]


class Layout(NamedTuple):
    """The places where a type stores its numbers; the bits of several fields of one number are joined."""

    codes: Fields
    scales: Fields = ()
    flags: Fields = ()  # 1: the part's levels are shifted
    signs: Fields = ()  # 1: the part's scale is negative
    minima: Fields = ()
    minus: Fields = ()  # signs of eight elements, a bit for each, or an index of ``Numbers.patterns``
    # The block's float16 scales, one for each row: the index of their first byte in the block, or the places of their
    # bits; IN_HEAD if they stand before the row, None if the type has none.
    d: int | Fields | None = 0
    d_minima: int | None = None  # the same of the block's float16 minima: the index of their first byte

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of a block that hold codes and nothing else."""
        return min(field.at for field in self.codes), max(field.stop for field in self.codes)

    def halves(self, d: int | Fields | None, rows: int) -> Fields:
        """Return the fields of float16 numbers that begin at byte ``d``, one for each row."""
        if isinstance(d, tuple):
            return d
        return () if d in (None, IN_HEAD) else (Field(d or 0, "k" * (rows.bit_length() - 1), 16, word=16),)


class Numbers(NamedTuple):
    """The meaning of a type's numbers.

    A part of ``part`` elements has the scale d · (``factor`` · s + ``offset``) · ``step``, or d · ``scale_levels``[s].
    An element is this scale times its level, less d_minima · m, or plus d_minima if the type has no m. Each operation
    rounds to float32; if d is float16, all but the last are exact.
    """

    part: int
    levels: tuple[float, ...] = ()  # value of each code; empty: codes are signed bytes
    factor: int = 1
    offset: int = 0
    shift: float = 0.0  # added to the levels of a part whose flag is set
    signed: bool = False  # scales are signed bytes
    step: float = 1.0  # a power of two
    scale_levels: tuple[float, ...] = ()
    width: int = 1  # elements of a code: 1, 2, 4 or 8
    grid: Callable[[], Tensor] | None = None  # makes the levels of codes for several elements, int8 (codes, width)
    patterns: tuple[int, ...] = ()  # bytes with the signs of eight elements, the first lowest; empty: stored as such


class Block(NamedTuple):
    """A block of a type, of one row or of interleaved rows."""

    numbers: Numbers
    layout: Layout
    # Converts stored blocks, uint8 (…, bytes), to blocks that ``layout`` describes; None if they are such. The kernel
    # does not decode blocks that are converted.
    rewrite: Callable[[Tensor], Tensor] | None = None

    def groups(self, rows: int) -> dict[str, tuple[Fields, int]]:
        """Return the fields of each kind of number, and the elements for which there is one; 0 means a row."""
        numbers, layout = self.numbers, self.layout
        return {
            "codes": (layout.codes, numbers.width),
            "minus": (layout.minus, SIGNS),
            "scales": (layout.scales, numbers.part),
            "flags": (layout.flags, numbers.part),
            "signs": (layout.signs, numbers.part),
            "minima": (layout.minima, numbers.part),
            "d": (layout.halves(layout.d, rows), 0),
            "d_minima": (layout.halves(layout.d_minima, rows), 0),
        }


def decode(block: Block, ggml_type: GgmlType, raw: Tensor, heads: Tensor | None) -> Tensor:
    """Dequantize blocks.

    ``raw`` is uint8 (groups of rows, blocks, bytes), ``heads`` float32 (groups, rows, 1), and the result float32
    (groups, rows, blocks, elements).
    """
    numbers, stored = block.numbers, raw if block.rewrite is None else block.rewrite(raw)
    stored_numbers = {
        name: read_numbers(fields, stored, ggml_type, per_number or ggml_type.elements)
        for name, (fields, per_number) in block.groups(ggml_type.rows).items()
        if fields
    }
    levels = _look_up(numbers, stored_numbers["codes"]).float()
    if (signs := stored_numbers.get("minus")) is not None:
        signs = signs if not numbers.patterns else torch.tensor(numbers.patterns, device=raw.device)[signs]
        of_each = 1 - 2 * (signs.unsqueeze(-1) >> torch.arange(SIGNS, device=raw.device) & 1)
        levels = levels * of_each.flatten(-2)
    # (groups, blocks, rows, parts, elements)
    parts = levels.reshape(*levels.shape[:-1], -1, min(numbers.part, ggml_type.elements))
    if (flags := stored_numbers.get("flags")) is not None:
        parts = parts + (flags * numbers.shift).unsqueeze(-1)
    parts = parts * (_find_scales(numbers, stored_numbers, heads) * numbers.step).unsqueeze(-1)
    if (d := stored_numbers.get("d_minima")) is not None:
        minima = _as_half(d) * stored_numbers.get("minima", -1)
        parts = parts - minima.unsqueeze(-1)
    return parts.flatten(-2).transpose(1, 2)


def _look_up(numbers: Numbers, codes: Tensor) -> Tensor:
    """Return the levels of codes, float32 or int8 (…, elements)."""
    if numbers.grid is not None:
        return numbers.grid().to(codes.device)[codes].flatten(-2)
    if numbers.levels:
        return torch.tensor(numbers.levels, dtype=torch.float32, device=codes.device)[codes]
    return codes.to(torch.int8)


def _find_scales(numbers: Numbers, stored_numbers: dict[str, Tensor], heads: Tensor | None) -> Tensor:
    """Return the scales of parts, float32 (groups, blocks, rows, 1 or parts)."""
    device = stored_numbers["codes"].device
    d = torch.ones(1, 1, 1, 1, device=device) if heads is None else heads.unsqueeze(1)
    if "d" in stored_numbers:
        d = _as_half(stored_numbers["d"])
    if (scales := stored_numbers.get("scales")) is None:
        return d
    if numbers.scale_levels:
        return d * torch.tensor(numbers.scale_levels, dtype=torch.float32, device=device)[scales]
    scales = (scales.to(torch.int8).to(torch.int32) if numbers.signed else scales) * numbers.factor + numbers.offset
    return d * (scales if "signs" not in stored_numbers else torch.where(stored_numbers["signs"] > 0, -scales, scales))


def _as_half(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.float16).float()


def read_numbers(fields: Fields, raw: Tensor, ggml_type: GgmlType, per_number: int) -> Tensor:
    """Return a number for ``per_number`` elements of a block, int32 (groups, blocks, rows, numbers)."""
    numbers = torch.zeros(1, dtype=torch.int32, device=raw.device)
    for field in fields:
        at, shift, n_bytes = _find_places(field, ggml_type.rows, ggml_type.elements, per_number, raw.device)
        words = raw[..., at].to(torch.int32)
        for more in range(1, n_bytes):  # a field in the last byte has no more
            words = words | raw[..., (at + more).clamp(max=raw.shape[-1] - 1)].to(torch.int32) << 8 * more
        numbers = numbers | (words >> shift & field.kept_mask) << field.up
    return numbers


def encode(block: Block, ggml_type: GgmlType, numbers: Mapping[str, Tensor]) -> Tensor:
    """Return blocks of one row with these numbers, uint8 (blocks, bytes).

    ``numbers`` are int32 (blocks, numbers), by the names of :meth:`Block.groups`.
    """
    stored = torch.zeros(len(numbers["codes"]), ggml_type.n_bytes, dtype=torch.int32)
    for name, (fields, per_number) in block.groups(1).items():
        for field in fields:
            at, shift, n_bytes = _find_places(
                field, 1, ggml_type.elements, per_number or ggml_type.elements, stored.device
            )
            bits = (numbers[name] >> field.up & field.kept_mask) << shift
            for more in range(n_bytes):
                stored.index_add_(1, at[0] + more, bits >> 8 * more & 0xFF)
    return stored.to(torch.uint8)


@cache
def _find_places(
    field: Field, rows: int, elements: int, per_number: int, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Return the bytes and lowest bits of :func:`_list_bits`, (rows, numbers), and the maximum bytes of a field."""
    bits = torch.tensor(_list_bits(field, rows, elements, per_number), device=device)
    shift = (bits & 7).to(torch.int32)
    return bits >> 3, shift, -(-(int(shift.amax()) + field.kept_mask.bit_length()) // 8)


@cache
def _list_bits(field: Field, rows: int, elements: int, per_number: int) -> list[list[int]]:
    """Return the place of a field's lowest bit in each row of a block, for ``per_number`` elements."""
    return [[field.find_bit(first, row, rows) for first in range(0, elements, per_number)] for row in range(rows)]


@cache
def describe(block: Block, ggml_type: GgmlType) -> BlocksStruct:
    """Describe blocks for the compiled kernel; ``Numbers.grid`` is left to the caller."""
    numbers = block.numbers
    groups = {name: group for name, group in block.groups(ggml_type.rows).items() if group[0]}
    run = 0 if numbers.width > 1 else min(_count_in_run(field, ggml_type) for field in block.layout.codes)
    run = min(run, numbers.part)
    first = numbers.levels[0] if are_consecutive(numbers.levels) else 0
    described = BlocksStruct(
        elements=ggml_type.elements,
        n_bytes=ggml_type.n_bytes,
        head=ggml_type.head,
        rows=ggml_type.rows,
        run=run,
        part=min(numbers.part, ggml_type.elements),
        width=numbers.width,
        factor=numbers.factor,
        offset=numbers.offset,
        are_signed=numbers.signed,
        are_bytes=not numbers.levels,
        first=int(first),
        shift=numbers.shift,
        step=numbers.step,
    )
    described.alive = []  # arrays that its pointers refer to
    for name, (fields, per_number) in groups.items():
        for bits, field in zip(getattr(described, name), fields, strict=False):
            in_runs = name == "codes" and run > 0
            of_rows = _list_bits(
                field, ggml_type.rows, ggml_type.elements, run if in_runs else per_number or ggml_type.elements
            )
            places = [place for of_row in of_rows for place in of_row]
            bits.spacing = _find_spacing(field, ggml_type, run) if in_runs else 0
            size = ggml_type.rows * ggml_type.n_bytes
            at = [
                place >> 3 if bits.spacing == BYTE_BITS else min(place >> 3, size - WORD_BITS // 8) for place in places
            ]
            _set_pointer(described, bits, "at", ctypes.c_uint16, at)
            shifts = [place - 8 * byte for place, byte in zip(places, at, strict=True)]
            _set_pointer(described, bits, "shift", ctypes.c_uint8, shifts)
            bits.mask, bits.up = field.kept_mask, field.up
    if numbers.levels and not are_consecutive(numbers.levels):
        unused = (0.0,) * (MIN_LEVELS - len(numbers.levels))
        _set_pointer(described, described, "levels", ctypes.c_float, numbers.levels + unused)
    _set_pointer(described, described, "scale_levels", ctypes.c_float, numbers.scale_levels)
    _set_pointer(described, described, "patterns", ctypes.c_uint8, numbers.patterns)
    return described


def _set_pointer(described: BlocksStruct, struct: Any, name: str, c_type: Any, numbers: Sequence[float]) -> None:
    """Set a pointer of a struct to numbers, if there are any."""
    if numbers:
        array = (c_type * len(numbers))(*numbers)
        setattr(struct, name, ctypes.addressof(array))
        described.alive.append(array)


def are_consecutive(levels: Sequence[float]) -> bool:
    """Return whether levels are equally far apart, by one."""
    return bool(levels) and list(levels) == [levels[0] + n for n in range(len(levels))]


def _count_in_run(field: Field, ggml_type: GgmlType) -> int:
    """Return how many consecutive elements have their fields at equal distances, in bytes or in a word."""
    return next(n for n in (32, 16, 8, 4, 2, 1) if n <= ggml_type.elements and _find_spacing(field, ggml_type, n))


def _find_spacing(field: Field, ggml_type: GgmlType, run: int) -> int:
    """Return the bits from one field to the next in each run of elements; 0 if they differ or are in several words."""
    size = ggml_type.rows * ggml_type.n_bytes
    spacing = set()
    for places in _list_bits(field, ggml_type.rows, ggml_type.elements, 1):
        for first in range(0, ggml_type.elements, run):
            run_places = places[first : first + run]
            spacing |= {after - before for before, after in pairwise(run_places)} or {BYTE_BITS}
            shift = run_places[0] - 8 * min(run_places[0] >> 3, size - WORD_BITS // 8)
            if spacing != {BYTE_BITS} and shift + run_places[-1] - run_places[0] + field.bits > WORD_BITS:
                return 0
    (only, *others) = spacing
    return 0 if others or only <= 0 else only
