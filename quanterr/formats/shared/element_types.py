"""Codes to float32, exactly: what several layouts share. Everything large is a buffer of the workspace."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.formats.base import Decoder, Dequantize, Element, Native, Parts
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.decoder import OfBlocks
from quanterr.tensors.workspace import OUTPUT, Workspace

E4M3_MAX = 0x7E  # magnitude bits of 448, the largest; 0x7F is NaN
E5M2_MAX = 0x7B  # magnitude bits of 57344, the largest; above are infinity and NaN
SIGN_COPY = ~(1 << 14)  # an int16 without bit 14

ROWS = 128  # that are added as bytes: at most 255
LANES = ROWS * 8
NONE = torch.zeros((), dtype=torch.int64)
FEW = 1 << 15  # flags that are added one by one sooner


class Codes(NamedTuple):
    """The values of codes: ``values`` times ``unit``, a power of two that a scale can take up."""

    values: Tensor  # (r, c) float32
    unit: float
    zeros: Tensor  # 0-d: how many are zero
    saturated: Tensor  # 0-d: how many have the largest finite magnitude


def e4m3(codes: Tensor, workspace: Workspace) -> Codes:
    """float8_e4m3fn codes, (r, c) int8; NaN codes give NaN.

    On the CPU torch's own cast takes 15 times as long as this: the code's bits, moved left by seven,
    are a float16 of the same sign and mantissa whose exponent is 8 too small, which is the unit.
    Sign extension leaves a copy of the sign in bit 14, which is cleared. Subnormals stay subnormals.
    """
    shape = tuple(codes.shape)
    values = workspace.output(shape)
    magnitudes = _magnitudes(codes, workspace)
    zeros = _count_zeros(magnitudes, workspace)
    if codes.device.type != "cpu":
        return Codes(values.copy_(codes.view(torch.float8_e4m3fn)), 1.0, zeros, _count_equal(magnitudes, E4M3_MAX))
    workspace.buffer("half", shape, torch.int16).copy_(codes).mul_(128).bitwise_and_(SIGN_COPY)
    values.copy_(workspace.buffer("half", shape, torch.float16))
    largest = int(magnitudes.max())
    if largest > E4M3_MAX:
        values.masked_fill_(magnitudes > E4M3_MAX, torch.nan)
    at_end = _count_equal(magnitudes, E4M3_MAX) if largest >= E4M3_MAX else NONE
    return Codes(values, 256.0, zeros, at_end)


def e5m2(codes: Tensor, workspace: Workspace) -> Codes:
    """float8_e5m2 codes, (r, c) int8: the upper bytes of float16 numbers, infinities and NaN included."""
    shape = tuple(codes.shape)
    magnitudes = _magnitudes(codes, workspace)
    zeros = _count_zeros(magnitudes, workspace)
    workspace.buffer("half", shape, torch.int16).copy_(codes).mul_(256)
    values = workspace.output(shape).copy_(workspace.buffer("half", shape, torch.float16))
    return Codes(values, 1.0, zeros, _count_equal(magnitudes, E5M2_MAX))


# By dtype, with the bytes that are saturated codes.
ELEMENTS = {
    "F32": (Element.F32, ()),
    "BF16": (Element.BF16, ()),
    "F16": (Element.F16, ()),
    "I8": (Element.I8, (0x7F, 0x80, 0x81)),
    "F8_E4M3": (Element.E4M3, (0x7E, 0xFE)),
    "F8_E5M2": (Element.TABLE, (0x7B, 0xFB)),
}


def native(
    parts: Parts, dequantize: Dequantize, scale: OfBlocks | None = None, group: int = 0, zero: OfBlocks | None = None
) -> Dequantize:
    """``dequantize`` with the same as data, of elements that are stored one by one; as it is, of other dtypes."""
    codes = parts.codes
    if codes.dtype not in ELEMENTS:
        return dequantize
    element, ends = ELEMENTS[codes.dtype]
    table = e5m2_table() if element == Element.TABLE else None
    decoder = Decoder(codes, parts.matrix[1], element, table, scale, zero, group=group, ends=ends)
    return Native(dequantize, decoder)


@cache
def e5m2_table() -> Tensor:
    """What each byte stands for, (256, 1) float32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()[:, None]


def read_floats(parts: Parts, chunk: Chunk, workspace: Workspace) -> Tensor:
    """The elements of a chunk of a weight that is stored as plain numbers, (r, c), float32; float64 of F64."""
    stored = workspace.read("stored", parts.codes, chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    if stored.dtype == torch.float64:
        return stored
    return workspace.output(chunk.shape).copy_(stored)


def read_fp8(parts: Parts, chunk: Chunk, workspace: Workspace) -> Codes:
    """The codes of a chunk of a weight that is stored as E4M3 or E5M2, element by element."""
    entry = parts.codes
    codes = workspace.read("codes", entry, chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    return (e4m3 if entry.dtype == "F8_E4M3" else e5m2)(codes, workspace)


def read_int8(parts: Parts, chunk: Chunk, workspace: Workspace) -> Codes:
    """The codes of a chunk of a weight that is stored as INT8, element by element."""
    codes = workspace.read("codes", parts.codes, chunk.row * parts.matrix[1] + chunk.col, chunk.shape)
    return int8(codes, workspace)


def int8(codes: Tensor, workspace: Workspace) -> Codes:
    """Integers, (r, c) int8; 127, -127 and -128 are at the end."""
    shape = tuple(codes.shape)
    values = workspace.output(shape).copy_(codes)
    flags = workspace.buffer("flags", shape, torch.int8)
    zeros = codes.numel() - count_ones(torch.clamp(codes, -1, 1, out=flags).abs_())
    at_end = torch.clamp(codes, min=-127, out=flags).abs_().sub_(126).clamp_(min=0)
    return Codes(values, 1.0, zeros, count_ones(at_end))


def e8m0(codes: Tensor) -> Tensor:
    """E8M0 exponents, uint8, as float32: 2^(code - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    powers = ((codes.long() + (1023 - 127)) << 52).view(torch.float64)  # a float64 whose exponent it is
    return powers.float().masked_fill_(codes == 255, torch.nan)


def small_float(exponent: int, mantissa: int, signed: bool = True) -> tuple[float, ...]:
    """The values of a float of so many bits by code: bias 2^(exponent - 1) - 1, subnormals, every code a number."""
    bias, one = 2 ** (exponent - 1) - 1, 1 << mantissa
    magnitudes = [
        (m / one if e == 0 else 1 + m / one) * 2.0 ** (max(e, 1) - bias)
        for e in range(1 << exponent)
        for m in range(one)
    ]
    return tuple([*magnitudes, *(-value for value in magnitudes)] if signed else magnitudes)


@cache
def _e5m3_table(device: torch.device) -> Tensor:
    return torch.tensor([*small_float(5, 3, signed=False)[:-1], torch.nan], device=device)


def e5m3(codes: Tensor) -> Tensor:
    """E5M3 numbers without a sign, uint8, as float32: bias 15, subnormals, 255 is NaN (AMD Quark)."""
    return _e5m3_table(codes.device)[codes.int()]


# E2M1 values by code: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0)
UINT4 = tuple(map(float, range(16)))

# OCP Microscaling Formats 1.0, 5.3.2
E2M3 = small_float(2, 3)
E3M2 = small_float(3, 2)


def nibble_pairs(values: Sequence[float], high_first: bool) -> Tensor:
    """What each byte of two 4-bit codes stands for: (256, 2) float32, given the values of the 16 codes."""
    table, codes = torch.tensor(values), torch.arange(256)
    high, low = table[codes >> 4], table[codes & 15]
    return torch.stack([high, low] if high_first else [low, high], 1)


@cache
def e2m1_pairs(high_first: bool, device: torch.device) -> Tensor:
    """What each byte of two E2M1 codes stands for, (256, 2) float32."""
    return nibble_pairs(E2M1, high_first).to(device)


@cache
def int4_pairs(device: torch.device) -> Tensor:
    """What each byte of two signed 4-bit codes stands for, the first in the low nibble: (256, 2) float32."""
    return nibble_pairs(INT4, high_first=False).to(device)


def unpack(codes: Tensor, table: Tensor, workspace: Workspace, key: str = OUTPUT) -> Tensor:
    """Several codes per byte, (r, w) of uint8 or int8, looked up in a table of (256, v): (r, v · w) float32.

    ``table`` is that of :func:`nibble_pairs`, or of other numbers of codes per byte; ``key`` names the buffer of
    the result.
    """
    indices = workspace.buffer("indices", tuple(codes.shape), torch.int32).copy_(codes.view(torch.uint8))
    return look_up(indices, table, workspace, key)


WHOLE_ROWS = {1: torch.float32, 2: torch.int64, 4: torch.complex128}  # by numbers in a row: a dtype as wide


def look_up(indices: Tensor, table: Tensor, workspace: Workspace, key: str = OUTPUT) -> Tensor:
    """Rows of a table, (n, v) float32, by their number, (r, w) int32, one after the other: (r, v · w).

    A row is moved as one element of a dtype as wide: torch moves rows of several six times as slowly.
    """
    n, (_, v) = indices.numel(), table.shape
    values = workspace.buffer(key, (n, v), torch.float32)
    if v in WHOLE_ROWS:
        whole = workspace.buffer(key, (n,), WHOLE_ROWS[v])
        torch.index_select(table.view(WHOLE_ROWS[v]).view(-1), 0, indices.view(-1), out=whole)
    else:
        torch.index_select(table, 0, indices.view(-1), out=values)
    return values.view(indices.shape[0], -1)


def e4m3_scales(codes: Tensor) -> Tensor:
    """E4M3 bytes of any integer dtype as float32; for scales, which are few."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def _magnitudes(codes: Tensor, workspace: Workspace) -> Tensor:
    return torch.bitwise_and(codes, 0x7F, out=workspace.buffer("magnitudes", tuple(codes.shape), torch.int8))


def _count_zeros(magnitudes: Tensor, workspace: Workspace) -> Tensor:
    flags = workspace.buffer("flags", tuple(magnitudes.shape), torch.int8)
    return magnitudes.numel() - count_ones(torch.clamp(magnitudes, max=1, out=flags))


def _count_equal(magnitudes: Tensor, value: int) -> Tensor:
    """How many magnitudes, int8 and not negative, are the value: 0-d. Overwrites them."""
    return magnitudes.numel() - count_ones(magnitudes.sub_(value).abs_().clamp_(max=1))


def count_ones(flags: Tensor) -> Tensor:
    """Sum of a contiguous int8 tensor of zeros and ones: 0-d int64.

    Eight flags are added at a time, as the bytes of one int64, over so few rows that no byte
    overflows into the next; torch's own sum of bytes takes five times as long.
    """
    flat = flags.view(-1)
    if flat.numel() < FEW:
        return flat.sum()
    rest = flat.numel() % LANES
    whole = flat[: flat.numel() - rest] if rest else flat
    total = whole.view(torch.int64).view(ROWS, -1).sum(0).view(torch.uint8).sum()
    return total + flat[-rest:].sum() if rest else total
