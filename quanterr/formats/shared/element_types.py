"""Exact conversion of codes to float32 for several layouts."""

from __future__ import annotations

from functools import cache, partial
from math import inf, nan

from quanterr.checkpoints import Entry
from quanterr.formats.base import Decoder, ElementType, Parts
from quanterr.kernel.decoder import BlockNumbers
from quanterr.kernel.grid import Grid, look_up_bytes
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import Chunk, as_matrix
from quanterr.tensors.workspace import Workspace

# Dtype → the kernel's element type, if there is one, and the bytes that count as saturated.
ELEMENTS = {
    "F32": (ElementType.F32, ()),
    "BF16": (ElementType.BF16, ()),
    "F16": (ElementType.F16, ()),
    "I8": (ElementType.I8, (0x7F, 0x80, 0x81)),
    "F8_E4M3": (ElementType.E4M3, (0x7E, 0xFE)),
    "F8_E5M2": (None, (0x7B, 0xFB)),  # by its levels
}


def read_one_by_one(
    parts: Parts,
    scale: BlockNumbers | None = None,
    group: int = 0,
    zero: BlockNumbers | None = None,
    factor: float | Grid | None = None,
    columns: Entry | None = None,
) -> Decoder:
    """Return the decoder of elements stored one by one; see :class:`Decoder`."""
    codes = parts.codes
    element, ends = ELEMENTS.get(codes.dtype, (None, ()))
    return Decoder(
        codes,
        parts.matrix[1],
        element,
        E5M2 if codes.dtype == "F8_E5M2" else (),
        scale,
        zero,
        group=group,
        ends=ends,
        factor=factor,
        columns=columns,
        read=None if codes.dtype in ELEMENTS else partial(read_floats, codes),
    )


def read_floats(codes: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Read a chunk of a weight stored as plain numbers, (r, c) float32, or float64 for F64."""
    stored = workspace.read("codes", codes, chunk.row * as_matrix(codes.shape)[1] + chunk.col, chunk.shape)
    return stored if stored.dtype == torch.float64 else stored.float()


def list_small_floats(exponent: int, mantissa: int, signed: bool = True) -> tuple[float, ...]:
    """Return the value of each code of a small float: bias 2^(exponent - 1) - 1, subnormals, no infinities or NaN."""
    bias, steps = 2 ** (exponent - 1) - 1, 1 << mantissa
    magnitudes = [
        (m / steps if e == 0 else 1 + m / steps) * 2.0 ** (max(e, 1) - bias)
        for e in range(1 << exponent)
        for m in range(steps)
    ]
    return tuple([*magnitudes, *(-value for value in magnitudes)] if signed else magnitudes)


# E2M1 values by code: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT8 = tuple(map(float, (*range(128), *range(-128, 0))))
INT4 = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0)

# OCP Microscaling Formats 1.0, 5.3.2
E2M3 = list_small_floats(2, 3)
E3M2 = list_small_floats(3, 2)
E5M3 = (*list_small_floats(5, 3, signed=False)[:-1], nan)
E4M3_SIZES = (*list_small_floats(4, 3, signed=False)[:-1], nan)
E4M3 = (*E4M3_SIZES, *(-size for size in E4M3_SIZES))
E5M2_SIZES = (*list_small_floats(5, 2, signed=False)[:124], inf, nan, nan, nan)
E5M2 = (*E5M2_SIZES, *(-size for size in E5M2_SIZES))


@cache
def list_integers(bits: int, zero: int = 0) -> tuple[float, ...]:
    """Return the value of each unsigned code minus ``zero``."""
    return tuple(float(code - zero) for code in range(1 << bits))


def decode_e4m3_scales(codes: Tensor) -> Tensor:
    """Convert E4M3 bytes of any dtype to float32; for scales, which are few."""
    return look_up_bytes(codes, E4M3)
