"""CodePacking of codes of 1 to 8 bits in containers of 8, 16, 32 or 64 bits.

    dense         a stream of bits, low first: code i is bits i · b …, across containers
    floor         as many whole codes as fit into each 32-bit word, low first; the word's other bits are unused
    planar        32 codes in b words: first the low 4 (2, 1) bits of all codes, then their next bits
    interleaved   8 codes of 4 bits in a word: column c is nibble 0 4 1 5 2 6 3 7
    spread        8 codes in b bytes (6 bits: 4 codes in 3 bytes); the low bits of each byte hold one code or two,
                  the leftover high bits hold the remaining codes

For 1, 2, 4 and 8 bits dense, floor, planar and spread are the same.

Reference: vllm-project/compressed-tensors@ac8e2ba8 compressors/pack_quantized/helpers.py (dense since 0.18, floor
before); ModelCloud/GPTQModel@f4c327a1 gptqmodel/utils/planar_packing.py; casper-hansen/AutoAWQ@88e4c76b
awq/utils/packing_utils.py; Disty0/sdnq 0.2.8 sdnq/packed_int/pack.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import gcd
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch

BYTE, WORD = 8, 32
WHOLE = (2, 4, 8)  # numbers of bits of which a container holds whole codes
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}  # widths, low plane first
# For each code: (first bit, width, place) of its fields in a run of bytes.
SPREAD = {
    3: (
        *(((start, 3, 0),) for start in (0, 8, 16, 3, 11, 19)),
        ((6, 2, 0), (22, 1, 2)),
        ((14, 2, 0), (23, 1, 2)),
    ),
    5: (
        *(((start, 5, 0),) for start in (0, 8, 16, 24, 32)),
        ((5, 3, 0), (29, 2, 3)),
        ((13, 3, 0), (37, 2, 3)),
        ((21, 3, 0), (39, 1, 3), (31, 1, 4)),
    ),
    6: (*(((start, 6, 0),) for start in (0, 8, 16)), ((22, 2, 0), (14, 2, 2), (6, 2, 4))),
    7: (
        *(((start, 7, 0),) for start in range(0, 56, 8)),
        tuple((8 * byte + 7, 1, 6 - byte) for byte in range(7)),
    ),
}
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


class Piece(NamedTuple):
    """Bits ``shift`` to ``shift + width`` of a byte, whose lowest bit is worth 2^place in the code."""

    byte: int
    shift: int
    width: int
    place: int


class PackedRun(NamedTuple):
    """The shortest run of codes after which the bit positions repeat."""

    n_bytes: int
    codes: tuple[tuple[Piece, ...], ...]


class CodePacking(NamedTuple):
    """A packing of codes of ``bits`` bits.

    If ``less_one``, codes are stored minus one: 1 is subtracted from each code of a container, so that a code of 0
    borrows from the next; of 3, 5, 6 and 7 bits from each code separately, modulo 2^bits.
    """

    name: str  # "dense", "floor", "planar", "interleaved", "spread"
    bits: int
    less_one: bool = False

    def count(self, n: int, container: int = WORD) -> int:
        """Return the number of containers, of so many bits, that hold ``n`` codes."""
        if self.name == "floor":
            return -(-n // (WORD // self.bits))
        return -(-n * self.bits // container)

    @property
    def run(self) -> PackedRun:
        """The run of codes that repeats."""
        return _find_run(self.name, self.bits)

    def repeat(self, code: int, n: int) -> int:
        """Return the little-endian number whose bytes are ``n`` equal codes."""
        fields = []
        for pieces in self.run.codes:
            parts = ((code >> piece.place & (1 << piece.width) - 1, piece) for piece in pieces)
            fields.append(sum(part << BYTE * piece.byte + piece.shift for part, piece in parts))
        whole, rest = divmod(n, len(fields))
        size = BYTE * self.run.n_bytes
        every = ((1 << size * whole) - 1) // ((1 << size) - 1)  # the lowest bit of each run
        return sum(fields) * every + (sum(fields[:rest]) << size * whole)

    def unpack(self, stored: Tensor, first: int, stop: int) -> Tensor:
        """Return codes ``first:stop`` of each row of containers, (…, containers) of any integer dtype: uint8 (…, n)."""
        if self.less_one and self.bits in WHOLE:
            stored = stored + sum(1 << place for place in range(0, BYTE * stored.element_size(), self.bits))
        (size, codes), n = self.run, len(self.run.codes)
        begin, end = first // n, -(-stop // n)
        width = stored.shape[-1] * stored.element_size()
        every = stored.contiguous().view(-1).view(torch.uint8).view(*stored.shape[:-1], width)
        held = every[..., begin * size : end * size]
        runs = torch.nn.functional.pad(held, (0, (end - begin) * size - held.shape[-1]))
        runs = runs.view(*held.shape[:-1], end - begin, size)
        found = runs.new_empty((*runs.shape[:-1], n))
        for place, pieces in enumerate(codes):
            first_piece, *others = (
                (runs[..., piece.byte] >> piece.shift & (1 << piece.width) - 1) << piece.place for piece in pieces
            )
            found[..., place] = sum(others, first_piece)
        wanted: Tensor = found.flatten(-2)[..., first - begin * n : stop - begin * n]
        return wanted + 1 & (1 << self.bits) - 1 if self.less_one and self.bits not in WHOLE else wanted


@cache
def _find_run(name: str, bits: int) -> PackedRun:
    codes: Sequence[Sequence[tuple[int, int, int]]]
    if name == "spread" and bits in SPREAD:
        length, codes = bits * BYTE if bits != 6 else 3 * BYTE, SPREAD[bits]
    elif name in ("dense", "spread"):
        length = bits * BYTE // gcd(bits, BYTE)
        codes = [[(start, bits, 0)] for start in range(0, length, bits)]
    elif name == "planar":
        length = bits * WORD
        codes = [list(_split_planes(bits, code)) for code in range(WORD)]
    else:
        length = WORD
        order = NIBBLES if name == "interleaved" else range(WORD // bits)
        codes = [[(place * bits, bits, 0)] for place in order]
    pieces = tuple(tuple(piece for field in fields for piece in _cut_field(*field)) for fields in codes)
    return PackedRun(length // BYTE, pieces)


def _split_planes(bits: int, code: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first bit, width, place) of a code's field in each plane."""
    place = 0
    for width in PLANES[bits]:
        yield place * WORD + code * width, width, place
        place += width


def _cut_field(start: int, width: int, place: int) -> Iterator[Piece]:
    """Cut a field at the boundaries of bytes."""
    while width:
        byte, shift = divmod(start, BYTE)
        taken = min(width, BYTE - shift)
        yield Piece(byte, shift, taken, place)
        start, width, place = start + taken, width - taken, place + taken
