"""Exact conversion of codes to float32 for several layouts. All large tensors are workspace buffers."""

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, ElementType, Native, Parts
from quanterr.kernel.decoder import OfBlocks, StoredScales
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import OUTPUT, Workspace

E4M3_MAX = 0x7E  # magnitude bits of 448, the largest; 0x7F is NaN
E5M2_MAX = 0x7B  # magnitude bits of 57344, the largest; above are infinity and NaN
SIGN_COPY = ~(1 << 14)  # mask of all bits of an int16 except bit 14

ROWS = 128  # rows of flags that are summed as bytes, which hold up to 255
LANES = ROWS * 8
NONE = torch.zeros((), dtype=torch.int64)
FEW = 1 << 15  # for fewer flags a plain sum is faster


class DecodedCodes(NamedTuple):
    """The values of codes: ``values`` times ``unit``, a power of two that can be merged into a scale."""

    values: Tensor  # (r, c) float32
    unit: float
    zeros: Tensor  # 0-d: number of zeros
    saturated: Tensor  # 0-d: number of codes with the largest finite magnitude


def decode_e4m3(codes: Tensor, workspace: Workspace) -> DecodedCodes:
    """Convert float8_e4m3fn codes, (r, c) int8; NaN codes give NaN.

    The code's bits, shifted left by seven, are a float16 of the same sign and mantissa whose exponent is 8 too small;
    ``unit`` makes up for that. Sign extension leaves a copy of the sign in bit 14, which is cleared. Subnormals stay
    subnormals. On the CPU, torch's own cast takes 15 times as long.
    """
    shape = tuple(codes.shape)
    values = workspace.output(shape)
    magnitudes = _take_magnitudes(codes, workspace)
    zeros = _count_zeros(magnitudes, workspace)
    if codes.device.type != "cpu":
        return DecodedCodes(
            values.copy_(codes.view(torch.float8_e4m3fn)), 1.0, zeros, _count_equal(magnitudes, E4M3_MAX)
        )
    workspace.buffer("half", shape, torch.int16).copy_(codes).mul_(128).bitwise_and_(SIGN_COPY)
    values.copy_(workspace.buffer("half", shape, torch.float16))
    largest = int(magnitudes.max())
    if largest > E4M3_MAX:
        values.masked_fill_(magnitudes > E4M3_MAX, torch.nan)
    at_end = _count_equal(magnitudes, E4M3_MAX) if largest >= E4M3_MAX else NONE
    return DecodedCodes(values, 256.0, zeros, at_end)


def decode_e5m2(codes: Tensor, workspace: Workspace) -> DecodedCodes:
    """Convert float8_e5m2 codes, (r, c) int8: the upper bytes of float16 numbers, infinities and NaN included."""
    shape = tuple(codes.shape)
    magnitudes = _take_magnitudes(codes, workspace)
    zeros = _count_zeros(magnitudes, workspace)
    workspace.buffer("half", shape, torch.int16).copy_(codes).mul_(256)
    values = workspace.output(shape).copy_(workspace.buffer("half", shape, torch.float16))
    return DecodedCodes(values, 1.0, zeros, _count_equal(magnitudes, E5M2_MAX))


# Dtype → the kernel's element type, and the bytes that count as saturated.
ELEMENTS = {
    "F32": (ElementType.F32, ()),
    "BF16": (ElementType.BF16, ()),
    "F16": (ElementType.F16, ()),
    "I8": (ElementType.I8, (0x7F, 0x80, 0x81)),
    "F8_E4M3": (ElementType.E4M3, (0x7E, 0xFE)),
    "F8_E5M2": (ElementType.TABLE, (0x7B, 0xFB)),
}


def read_one_by_one(
    parts: Parts,
    scale: OfBlocks | None = None,
    group: int = 0,
    zero: OfBlocks | None = None,
    stored: StoredScales | None = None,
    factor: float = 0.0,
    columns: Entry | None = None,
) -> Native:
    """Return the function that decodes elements stored one by one; see :class:`Decoder`."""
    codes = parts.codes
    element, ends = ELEMENTS.get(codes.dtype, (None, ()))
    decoder = Decoder(
        codes,
        parts.matrix[1],
        element,
        e5m2_table() if element == ElementType.TABLE else None,
        scale,
        zero,
        group=group,
        ends=ends,
        stored=stored,
        factor=factor,
        columns=columns,
        read=partial(read_floats, codes) if element is None else None,
    )
    return Native(decoder)


@cache
def e5m2_table() -> Tensor:
    """Return the value of each E5M2 byte, (256, 1) float32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()[:, None]


# Functions that decode elements stored one by one take the codes' entry, so that weights need not keep their Parts.


def read_elements(codes: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read a chunk of elements that are stored one by one, (r, c)."""
    return workspace.read("codes", codes, chunk.row * as_matrix(codes.shape)[1] + chunk.col, chunk.shape)


def read_floats(codes: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read a chunk of a weight stored as plain numbers, (r, c) float32, or float64 for F64."""
    stored = read_elements(codes, chunk, workspace)
    if stored.dtype == torch.float64:
        return stored
    return workspace.output(chunk.shape).copy_(stored)


def read_fp8(codes: Entry, chunk: Chunk, workspace: Workspace) -> DecodedCodes:
    """Read the codes of a chunk stored as E4M3 or E5M2, element by element."""
    decode = decode_e4m3 if codes.dtype == "F8_E4M3" else decode_e5m2
    return decode(read_elements(codes, chunk, workspace), workspace)


def read_int8(codes: Entry, chunk: Chunk, workspace: Workspace) -> DecodedCodes:
    """Read the codes of a chunk stored as INT8, element by element."""
    return decode_int8(read_elements(codes, chunk, workspace), workspace)


def decode_int8(codes: Tensor, workspace: Workspace) -> DecodedCodes:
    """Convert integers, (r, c) int8; 127, -127 and -128 count as saturated."""
    shape = tuple(codes.shape)
    values = workspace.output(shape).copy_(codes)
    flags = workspace.buffer("flags", shape, torch.int8)
    zeros = codes.numel() - count_ones(torch.clamp(codes, -1, 1, out=flags).abs_())
    at_end = torch.clamp(codes, min=-127, out=flags).abs_().sub_(126).clamp_(min=0)
    return DecodedCodes(values, 1.0, zeros, count_ones(at_end))


def decode_e8m0(codes: Tensor) -> Tensor:
    """Convert E8M0 exponents, uint8, to float32: 2^(code - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    return _look_up(_make_e8m0_table(codes.device), codes)


@cache
def _make_e8m0_table(device: torch.device) -> Tensor:
    return torch.tensor([*(2.0 ** (code - 127) for code in range(255)), torch.nan], device=device)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Look up the values of bytes, such as scales; on the CPU this is faster than arithmetic and torch's casts."""
    return table.index_select(0, codes.contiguous().view(torch.uint8).view(-1).int()).view(codes.shape)


def list_small_floats(exponent: int, mantissa: int, signed: bool = True) -> tuple[float, ...]:
    """Return the value of each code of a small float: bias 2^(exponent - 1) - 1, subnormals, no infinities or NaN."""
    bias, one = 2 ** (exponent - 1) - 1, 1 << mantissa
    magnitudes = [
        (m / one if e == 0 else 1 + m / one) * 2.0 ** (max(e, 1) - bias)
        for e in range(1 << exponent)
        for m in range(one)
    ]
    return tuple([*magnitudes, *(-value for value in magnitudes)] if signed else magnitudes)


@cache
def _make_e5m3_table(device: torch.device) -> Tensor:
    return torch.tensor([*list_small_floats(5, 3, signed=False)[:-1], torch.nan], device=device)


def decode_e5m3(codes: Tensor) -> Tensor:
    """Convert unsigned E5M3 numbers, uint8, to float32: bias 15, subnormals, 255 is NaN (AMD Quark)."""
    return _look_up(_make_e5m3_table(codes.device), codes)


# E2M1 values by code: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0)
UINT4 = tuple(map(float, range(16)))

# OCP Microscaling Formats 1.0, 5.3.2
E2M3 = list_small_floats(2, 3)
E3M2 = list_small_floats(3, 2)


def nibble_pairs(values: Sequence[float], high_first: bool) -> Tensor:
    """Return the values of the two 4-bit codes in each byte, (256, 2) float32, given the values of the 16 codes."""
    table, codes = torch.tensor(values), torch.arange(256)
    high, low = table[codes >> 4], table[codes & 15]
    return torch.stack([high, low] if high_first else [low, high], 1)


@cache
def e2m1_pairs(high_first: bool, device: torch.device) -> Tensor:
    """Return the values of the two E2M1 codes in each byte, (256, 2) float32."""
    return nibble_pairs(E2M1, high_first).to(device)


@cache
def int4_pairs(device: torch.device) -> Tensor:
    """Return the values of the two signed 4-bit codes in each byte, the low nibble first, (256, 2) float32."""
    return nibble_pairs(INT4, high_first=False).to(device)


@cache
def uint4_pairs(device: torch.device) -> Tensor:
    """Return the values of the two unsigned 4-bit codes in each byte, the low nibble first, (256, 2) float32."""
    return nibble_pairs(UINT4, high_first=False).to(device)


def unpack(codes: Tensor, table: Tensor, workspace: Workspace, key: str = OUTPUT) -> Tensor:
    """Look up bytes of several codes each, (r, w) uint8 or int8, in a table, (256, v): (r, v · w) float32.

    ``table`` has v values per byte, as from :func:`nibble_pairs`; ``key`` names the buffer of the result.
    """
    indices = workspace.buffer("indices", tuple(codes.shape), torch.int32).copy_(codes.view(torch.uint8))
    return look_up(indices, table, workspace, key)


WHOLE_ROWS = {4: torch.float32, 8: torch.int64, 16: torch.complex128}  # by bytes of a row


def look_up(indices: Tensor, table: Tensor, workspace: Workspace, key: str = OUTPUT) -> Tensor:
    """Gather rows of a table, (n, v), by index, (r, w) int32 or int64, one after the other: (r, v · w).

    A row is moved as one element of a wide dtype: torch takes six times as long for rows of several elements.
    """
    n, (_, v) = indices.numel(), table.shape
    values = workspace.buffer(key, (n, v), table.dtype)
    row = WHOLE_ROWS.get(v * table.dtype.itemsize)
    if row is None:
        torch.index_select(table, 0, indices.view(-1), out=values)
    else:
        whole = workspace.buffer(key, (n,), row)
        torch.index_select(table.view(row).view(-1), 0, indices.view(-1), out=whole)
    return values.view(indices.shape[0], -1)


def decode_e4m3_scales(codes: Tensor) -> Tensor:
    """Convert E4M3 bytes of any dtype to float32; for scales, which are few."""
    return _look_up(_make_e4m3_table(codes.device), codes)


@cache
def _make_e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _take_magnitudes(codes: Tensor, workspace: Workspace) -> Tensor:
    return torch.bitwise_and(codes, 0x7F, out=workspace.buffer("magnitudes", tuple(codes.shape), torch.int8))


def _count_zeros(magnitudes: Tensor, workspace: Workspace) -> Tensor:
    flags = workspace.buffer("flags", tuple(magnitudes.shape), torch.int8)
    return magnitudes.numel() - count_ones(torch.clamp(magnitudes, max=1, out=flags))


def _count_equal(magnitudes: Tensor, value: int) -> Tensor:
    """Count the magnitudes, nonnegative int8, that equal ``value``: 0-d. Overwrites ``magnitudes``."""
    return magnitudes.numel() - count_ones(magnitudes.sub_(value).abs_().clamp_(max=1))


def count_ones(flags: Tensor) -> Tensor:
    """Sum a contiguous int8 tensor of zeros and ones: 0-d int64.

    Eight flags are added at a time as the bytes of one int64, over so few rows that no byte overflows into the next;
    torch's own sum of bytes takes five times as long.
    """
    flat = flags.view(-1)
    if flat.numel() < FEW:
        return flat.sum()
    rest = flat.numel() % LANES
    whole = flat[: flat.numel() - rest] if rest else flat
    total = whole.view(torch.int64).view(ROWS, -1).sum(0).view(torch.uint8).sum()
    return total + flat[-rest:].sum() if rest else total
