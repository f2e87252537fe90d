"""The packing of codes of 1 to 8 bits in containers of 8, 16, 32 or 64 bits.

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

BYTE_BITS, WORD_BITS = 8, 32
ALIGNED_BITS = (2, 4, 8)  # sizes of codes, in bits, that fill a container without crossing its end
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


class Field(NamedTuple):
    """Bits ``shift`` to ``shift + width`` of a byte, whose lowest bit is worth 2^place in the code."""

    byte: int
    shift: int
    width: int
    place: int


class PackedRun(NamedTuple):
    """The shortest run of codes after which the bit positions repeat."""

    n_bytes: int
    codes: tuple[tuple[Field, ...], ...]


class CodePacking(NamedTuple):
    """A packing of codes of ``bits`` bits.

    If ``less_one``, codes are stored minus one. For 2, 4 and 8 bits, 1 is subtracted from each code of a container, so
    that a code of 0 borrows from the next code; for other bits from each code separately, modulo 2^bits.
    """

    name: str  # "dense", "floor", "planar", "interleaved", "spread"
    bits: int
    less_one: bool = False

    def count(self, n: int, container: int = WORD_BITS) -> int:
        """Return the number of containers, of so many bits, that hold ``n`` codes."""
        if self.name == "floor":
            return -(-n // (WORD_BITS // self.bits))
        return -(-n * self.bits // container)

    @property
    def run(self) -> PackedRun:
        """The run of codes that repeats."""
        return _find_run(self.name, self.bits)

    def repeat(self, code: int, n: int) -> int:
        """Return the little-endian number whose bytes are ``n`` equal codes."""
        fields = []
        for code_fields in self.run.codes:
            values = ((code >> field.place & (1 << field.width) - 1, field) for field in code_fields)
            fields.append(sum(value << BYTE_BITS * field.byte + field.shift for value, field in values))
        n_runs, rest = divmod(n, len(fields))
        size = BYTE_BITS * self.run.n_bytes
        run_starts = ((1 << size * n_runs) - 1) // ((1 << size) - 1)  # the lowest bit of each run
        return sum(fields) * run_starts + (sum(fields[:rest]) << size * n_runs)

    def unpack(self, stored: Tensor, first: int, stop: int) -> Tensor:
        """Return codes ``first:stop`` of each row of containers, (…, containers) of any integer dtype: uint8 (…, n)."""
        if self.less_one and self.bits in ALIGNED_BITS:
            stored = stored + sum(1 << place for place in range(0, BYTE_BITS * stored.element_size(), self.bits))
        (size, codes), n = self.run, len(self.run.codes)
        begin, end = first // n, -(-stop // n)
        width = stored.shape[-1] * stored.element_size()
        all_bytes = stored.contiguous().view(-1).view(torch.uint8).view(*stored.shape[:-1], width)
        held = all_bytes[..., begin * size : end * size]
        runs = torch.nn.functional.pad(held, (0, (end - begin) * size - held.shape[-1]))
        runs = runs.view(*held.shape[:-1], end - begin, size)
        codes_of_runs = runs.new_empty((*runs.shape[:-1], n))
        for place, code_fields in enumerate(codes):
            first_field, *others = (
                (runs[..., field.byte] >> field.shift & (1 << field.width) - 1) << field.place for field in code_fields
            )
            codes_of_runs[..., place] = sum(others, first_field)
        wanted: Tensor = codes_of_runs.flatten(-2)[..., first - begin * n : stop - begin * n]
        return wanted + 1 & (1 << self.bits) - 1 if self.less_one and self.bits not in ALIGNED_BITS else wanted


@cache
def _find_run(name: str, bits: int) -> PackedRun:
    codes: Sequence[Sequence[tuple[int, int, int]]]
    if name == "spread" and bits in SPREAD:
        length, codes = bits * BYTE_BITS if bits != 6 else 3 * BYTE_BITS, SPREAD[bits]
    elif name in ("dense", "spread"):
        length = bits * BYTE_BITS // gcd(bits, BYTE_BITS)
        codes = [[(start, bits, 0)] for start in range(0, length, bits)]
    elif name == "planar":
        length = bits * WORD_BITS
        codes = [list(_split_planes(bits, code)) for code in range(WORD_BITS)]
    else:
        length = WORD_BITS
        order = NIBBLES if name == "interleaved" else range(WORD_BITS // bits)
        codes = [[(place * bits, bits, 0)] for place in order]
    cut_fields = tuple(tuple(cut for field in fields for cut in _cut_field(*field)) for fields in codes)
    return PackedRun(length // BYTE_BITS, cut_fields)


def _split_planes(bits: int, code: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first bit, width, place) of a code's field in each plane."""
    place = 0
    for width in PLANES[bits]:
        yield place * WORD_BITS + code * width, width, place
        place += width


def _cut_field(start: int, width: int, place: int) -> Iterator[Field]:
    """Cut a field at the boundaries of bytes."""
    while width:
        byte, shift = divmod(start, BYTE_BITS)
        taken = min(width, BYTE_BITS - shift)
        yield Field(byte, shift, taken, place)
        start, width, place = start + taken, width - taken, place + taken
