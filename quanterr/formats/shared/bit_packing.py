"""Packing of codes of 1 to 8 bits in containers of 8, 16, 32 or 64 bits.

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

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import lcm
from typing import NamedTuple

from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import OUTPUT, Workspace

BYTE, WORD = 8, 32
FEW = 1 << 14  # codes up to which temporary tensors cost less than one operation after another for each place
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
    """Bits ``shift`` to ``shift + width`` of a container, whose lowest bit is worth 2^place in the code."""

    container: int
    shift: int
    width: int
    place: int


class PackedRun(NamedTuple):
    """The shortest run of codes after which the bit positions repeat."""

    containers: int
    codes: tuple[tuple[Piece, ...], ...]


class Packing(NamedTuple):
    """A packing of codes of ``bits`` bits."""

    name: str  # "dense", "floor", "planar", "interleaved", "spread"
    bits: int

    def words(self, n: int) -> int:
        """Return the number of 32-bit words that hold ``n`` codes."""
        if self.name == "floor":
            return -(-n // (WORD // self.bits))
        return -(-n * self.bits // WORD)

    def run(self, unit: int) -> PackedRun:
        """Return the run of codes that repeats in containers of ``unit`` bits."""
        return _find_run(self, unit)

    def repeat(self, code: int, n: int) -> int:
        """Return the little-endian number whose bytes are ``n`` equal codes."""
        run, fields = self.run(BYTE), []
        for pieces in run.codes:
            parts = ((code >> piece.place & (1 << piece.width) - 1, piece) for piece in pieces)
            fields.append(sum(part << BYTE * piece.container + piece.shift for part, piece in parts))
        whole, rest = divmod(n, len(fields))
        size = BYTE * run.containers
        every = ((1 << size * whole) - 1) // ((1 << size) - 1)  # the lowest bit of each run
        return sum(fields) * every + (sum(fields[:rest]) << size * whole)


@cache
def _find_run(packing: Packing, unit: int) -> PackedRun:
    name, bits = packing
    codes: Sequence[Sequence[tuple[int, int, int]]]
    if name == "spread" and bits in SPREAD:
        length, codes = bits * BYTE if bits != 6 else 3 * BYTE, SPREAD[bits]
    elif name in ("dense", "spread"):
        length = lcm(bits, unit)
        codes = [[(start, bits, 0)] for start in range(0, length, bits)]
    elif name == "planar":
        length = bits * WORD
        codes = [list(_split_planes(bits, code)) for code in range(WORD)]
    else:
        length = WORD
        order = NIBBLES if name == "interleaved" else range(WORD // bits)
        codes = [[(place * bits, bits, 0)] for place in order]
    pieces = tuple(tuple(piece for field in fields for piece in _cut_field(*field, unit)) for fields in codes)
    return PackedRun(length // unit, pieces)


def _split_planes(bits: int, code: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first bit, width, place) of a code's field in each plane."""
    place = 0
    for width in PLANES[bits]:
        yield place * WORD + code * width, width, place
        place += width


def _cut_field(start: int, width: int, place: int, unit: int) -> Iterator[Piece]:
    """Cut a field at the boundaries of containers."""
    while width:
        container, shift = divmod(start, unit)
        taken = min(width, unit - shift)
        yield Piece(container, shift, taken, place)
        start, width, place = start + taken, width - taken, place + taken


def unpack_columns(stored: Tensor, packing: Packing, workspace: Workspace, key: str = OUTPUT) -> Tensor:
    """Unpack whole runs of codes packed along each row: (r, containers) of any integer dtype to (r, n) float32."""
    run = packing.run(BYTE)
    units = _pad_to_runs(stored.view(torch.uint8), 1, run.containers, workspace)
    r, n_units = units.shape
    n_runs = r * n_units // run.containers
    values = workspace.buffer(key, (r, n_runs // r * len(run.codes)), torch.float32)
    if packing.name == "planar":
        codes = workspace.buffer("codes", (n_runs, len(run.codes)), torch.uint8)
        return values.copy_(_join_planes(units.view(n_runs, -1), packing.bits, codes, workspace).view(values.shape))
    _unpack(units.view(n_runs, run.containers, 1), run, values.view(n_runs, len(run.codes), 1), workspace)
    return values


def _join_planes(units: Tensor, bits: int, codes: Tensor, workspace: Workspace) -> Tensor:
    """Unpack planar codes of whole runs plane by plane: (runs, 4 · bits) bytes to (runs, 32) uint8."""
    place = 0
    for width in PLANES[bits]:
        plane = workspace.buffer("plane", (len(units), 4 * width), torch.uint8)
        plane.copy_(units[:, 4 * place : 4 * (place + width)])
        found = codes if place == 0 else workspace.buffer("higher", tuple(codes.shape), torch.uint8)
        run = Packing("dense", width).run(BYTE)
        _unpack(plane.view(-1, run.containers, 1), run, found.view(-1, len(run.codes), 1), workspace)
        if place:
            codes.bitwise_or_(found.bitwise_left_shift_(place))
        place += width
    return codes


def unpack_rows(stored: Tensor, packing: Packing, workspace: Workspace, key: str = OUTPUT) -> Tensor:
    """Unpack whole runs of codes packed down each column: (containers, c) of any integer dtype to (n, c) float32."""
    run = packing.run(8 * stored.element_size())
    units = _pad_to_runs(stored, 0, run.containers, workspace)
    units = units.view(torch.uint8) if units.dtype == torch.int8 else units
    n_units, c = units.shape
    runs = n_units // run.containers
    values = workspace.buffer(key, (runs * len(run.codes), c), torch.float32)
    _unpack(units.view(runs, run.containers, c), run, values.view(runs, len(run.codes), c), workspace)
    return values


def unpack_transposed(
    stored: Tensor,
    packing: Packing,
    rows: tuple[int, int],
    workspace: Workspace,
    key: str,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Unpack the codes of rows ``rows[0]:rows[1]`` stored transposed: (c, containers) to (r, c) float32.

    ``change`` is applied to the containers in place first.
    """
    run = packing.run(8 * stored.element_size())
    first, last = rows[0] // len(run.codes), -(-rows[1] // len(run.codes))
    containers = stored[:, first * run.containers : last * run.containers].t()
    transposed = workspace.buffer(f"turned {key}", tuple(containers.shape), stored.dtype).copy_(containers)
    codes = unpack_rows(change(transposed) if change else transposed, packing, workspace, key)
    return codes[rows[0] - first * len(run.codes) : rows[1] - first * len(run.codes)]


def crop_columns(values: Tensor, first: int, stop: int, workspace: Workspace) -> Tensor:
    """Return columns ``first:stop`` of ``values``, contiguous."""
    if (first, stop) == (0, values.shape[1]):
        return values
    shape = values.shape[0], stop - first
    return workspace.buffer("cropped", shape, torch.float32).copy_(values[:, first:stop])


def _pad_to_runs(units: Tensor, dim: int, length: int, workspace: Workspace) -> Tensor:
    """Return the containers as a contiguous tensor, padded with zeros along ``dim`` to whole runs of ``length``."""
    missing = -units.shape[dim] % length
    if not missing:
        return units.contiguous()
    shape = (units.shape[0] + missing * (dim == 0), units.shape[1] + missing * (dim == 1))
    padded = workspace.buffer("runs", shape, units.dtype).zero_()
    padded.narrow(dim, 0, units.shape[dim]).copy_(units)
    return padded


def _unpack(units: Tensor, run: PackedRun, values: Tensor, workspace: Workspace) -> None:
    """Unpack containers, (runs, containers, c), into ``values``, (runs, codes, c)."""
    shape = units.shape[0], units.shape[2]
    if run.containers == 1 and values.numel() <= FEW:  # each code is one piece
        shifts, mask = _list_shifts(run, units.dtype, units.device)
        values.copy_(units.bitwise_right_shift(shifts).bitwise_and_(mask))
        return
    code, more = (workspace.buffer(key, shape, units.dtype) for key in ("code", "more"))
    for place, pieces in enumerate(run.codes):
        for number, piece in enumerate(pieces):
            bits = more if number else code
            torch.bitwise_right_shift(units[:, piece.container], piece.shift, out=bits)
            if piece.width < 8 * units.element_size():
                bits.bitwise_and_((1 << piece.width) - 1)
            if piece.place:
                bits.bitwise_left_shift_(piece.place)
            if number:
                code.bitwise_or_(more)
        values[:, place].copy_(code)


@cache
def _list_shifts(run: PackedRun, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """Return the shift of each code in its container, (codes, 1), and the mask that all codes share."""
    pieces = [piece for (piece,) in run.codes]
    shifts = torch.tensor([piece.shift for piece in pieces], dtype=dtype, device=device)
    return shifts[:, None], (1 << pieces[0].width) - 1
