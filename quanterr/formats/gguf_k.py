"""GGUF: the K-quants, blocks of 256 elements whose scales for 16 or 32 are themselves codes.

    bytes   Q2_K   scales 16, codes 64, d f16, dmin f16
            Q3_K   third 32, codes 64, scales 12, d f16
            Q4_K   d f16, dmin f16, scales 12, codes 128
            Q5_K   d f16, dmin f16, scales 12, fifth 32, codes 128
            Q6_K   codes 128, upper 64, scales 16 i8, d f16

    Q2_K, Q4_K, Q5_K        element = (d * scale) * code - dmin * minimum
    Q3_K, Q6_K              element = (d * scale) * (code - 4 or 32)

Codes of 2 bits: byte l of the 32 bytes for half a block holds the codes of elements l, 32 + l, 64 + l and 96 + l of
that half, the lowest bits first. Codes of 4 bits: byte l of the 32 bytes for a quarter of the block holds the code of
element l of the quarter in its lower half and of element 32 + l in its upper half (Q6_K: l and 64 + l of a half, for l
below 64). The third bit of Q3_K and the fifth of Q5_K: byte l holds the bits of elements l, 32 + l … 224 + l, the
lowest first. The upper two bits of Q6_K are stored as codes of 2 bits.

Scales: Q2_K: scale in the lower, minimum in the upper half of byte e // 16. Q6_K: byte e // 16. Q3_K: 16 scales of 6
bits minus 32; the lower four bits in the lower halves, then the upper halves, of 8 bytes, the upper two bits as codes
of 2 bits in 4 bytes. Q4_K and Q5_K: 8 scales and 8 minima of 6 bits; the first four of each in the lower bits of bytes
0 to 3 and 4 to 7, the last four in the halves of bytes 8 to 11 and the upper two bits of bytes 0 to 3 and 4 to 7.

Computed in float32: d * scale * code and dmin * minimum are exact (except in Q6_K), the last operation rounds once.

The types …_R4 and …_R8 of ik_llama.cpp interleave 4 or 8 rows: shared/ggml_interleaved.py.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_q2_K … q6_K, get_scale_min_k4.
"""

import torch
from torch import Tensor

from quanterr.formats.base import Workspace
from quanterr.formats.shared.ggml_blocks import (
    BlockType,
    block_formats,
    code_buffer,
    read_half,
    split_fields,
    split_nibbles,
)
from quanterr.formats.shared.ggml_interleaved import INTERLEAVED
from quanterr.kernel.levels import ScaleSteps


def q2_k(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q2_K blocks: 84 bytes to 256 elements."""
    codes = _read_two_bits(raw, 16, workspace)
    scales = raw[:, :16]
    out.copy_(codes.view(-1, 256))
    of_16 = out.view(-1, 16, 16)
    of_16.mul_(read_half(raw, 80).mul(scales & 15).unsqueeze(2)).sub_(read_half(raw, 82).mul(scales >> 4).unsqueeze(2))


def q3_k(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q3_K blocks: 110 bytes to 256 elements."""
    codes = _read_two_bits(raw, 32, workspace).view(-1, 8, 32)
    for eighth, third in enumerate(split_fields(raw, 0, 32, 1, workspace)):
        codes[:, eighth].bitwise_or_(third.mul_(4))
    low, high = raw[:, 96:104], raw[:, 104:108]
    scales = torch.cat([low & 15, low >> 4], 1) | torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 1)
    out.copy_(codes.view(torch.int8).sub_(4).view(-1, 256))
    out.view(-1, 16, 16).mul_(read_half(raw, 108).mul(scales.view(torch.int8) - 32).unsqueeze(2))


def q4_k(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q4_K blocks: 144 bytes to 256 elements."""
    _scale_and_shift(out.copy_(_read_four_bits(raw, 16, workspace).view(-1, 256)), raw)


def q5_k(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q5_K blocks: 176 bytes to 256 elements."""
    codes = _read_four_bits(raw, 48, workspace)
    for eighth, fifth in enumerate(split_fields(raw, 16, 48, 1, workspace)):
        codes[:, eighth].bitwise_or_(fifth.mul_(16))
    _scale_and_shift(out.copy_(codes.view(-1, 256)), raw)


def q6_k(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q6_K blocks: 210 bytes to 256 elements."""
    codes = code_buffer(workspace, len(raw), 2, 2, 2, 32)  # halves of the block, of the byte and of the 64 bytes
    low, high = split_nibbles(raw, 0, 128, workspace)
    codes[:, :, 0], codes[:, :, 1] = low.view(-1, 2, 2, 32), high.view(-1, 2, 2, 32)
    quarters = codes.view(-1, 2, 4, 32)
    for quarter, upper in enumerate(split_fields(raw, 128, 192, 2, workspace)):
        quarters[:, :, quarter].bitwise_or_(upper.mul_(16).view(-1, 2, 32))
    out.copy_(codes.view(torch.int8).sub_(32).view(-1, 256))
    out.view(-1, 16, 16).mul_(read_half(raw, 208).mul(raw[:, 192:208].view(torch.int8)).unsqueeze(2))


def _read_two_bits(raw: Tensor, at: int, workspace: Workspace) -> Tensor:
    """Return the codes in the 64 bytes from ``at`` on, uint8 (n, 2, 4, 32)."""
    codes = code_buffer(workspace, len(raw), 2, 4, 32)
    for quarter, field in enumerate(split_fields(raw, at, at + 64, 2, workspace)):
        codes[:, :, quarter] = field.view(-1, 2, 32)
    return codes


def _read_four_bits(raw: Tensor, at: int, workspace: Workspace) -> Tensor:
    """Return the codes in the 128 bytes from ``at`` on, uint8 (n, 8, 32)."""
    codes = code_buffer(workspace, len(raw), 4, 2, 32)
    low, high = split_nibbles(raw, at, at + 128, workspace)
    codes[:, :, 0], codes[:, :, 1] = low.view(-1, 4, 32), high.view(-1, 4, 32)
    return codes.view(-1, 8, 32)


def _scale_and_shift(codes: Tensor, raw: Tensor) -> None:
    """Multiply codes, float32 (n, 256), by their scales and subtract their minima, in place: Q4_K and Q5_K."""
    first, second, last = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 2 & 48], 1)
    minima = torch.cat([second & 63, last >> 4 | second >> 2 & 48], 1)
    of_32 = codes.view(-1, 8, 32)
    of_32.mul_(read_half(raw, 0).mul(scales).unsqueeze(2)).sub_(read_half(raw, 2).mul(minima).unsqueeze(2))


FORMATS = block_formats(
    (
        BlockType(
            "Q2_K",
            "2-bit codes, a scale and a minimum for 16",
            q2_k,
            16,
            2,
            (10, 12),
            (16, 80),
            uniform=True,
            scale_steps=ScaleSteps(16, 15, 15),
            rows=INTERLEAVED["Q2_K"],
        ),
        BlockType(
            "Q3_K",
            "3-bit codes, a scale for 16",
            q3_k,
            16,
            3,
            (16, 18),
            (0, 96),
            uniform=True,
            scale_steps=ScaleSteps(16, 31),
            rows=INTERLEAVED["Q3_K"],
        ),
        BlockType(
            "Q4_K",
            "4-bit codes, a scale and a minimum for 32",
            q4_k,
            32,
            4,
            (22, 24),
            (16, 144),
            uniform=True,
            scale_steps=ScaleSteps(8, 63, 63),
            rows=INTERLEAVED["Q4_K"],
        ),
        BlockType(
            "Q5_K",
            "5-bit codes, a scale and a minimum for 32",
            q5_k,
            32,
            5,
            (28, 30),
            (16, 176),
            uniform=True,
            scale_steps=ScaleSteps(8, 63, 63),
            rows=INTERLEAVED["Q5_K"],
        ),
        BlockType(
            "Q6_K",
            "6-bit codes, a scale for 16",
            q6_k,
            16,
            6,
            (34, 36),
            (0, 192),
            uniform=True,
            scale_steps=ScaleSteps(16, 127),
            rows=INTERLEAVED["Q6_K"],
        ),
    ),
)
