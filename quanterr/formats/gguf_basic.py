"""GGUF: the plain blocks of 32 elements, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

    bytes   Q4_0   d f16, codes 16             element = (code - 8) * d
            Q4_1   d f16, m f16, codes 16      element = code * d + m
            Q5_0   d f16, fifth 4, codes 16    element = (code - 16) * d
            Q5_1   d f16, m f16, fifth 4, codes 16
                                               element = code * d + m
            Q8_0   d f16, codes 32 i8          element = code * d

Byte j of the 16 bytes of codes holds the code of element j in its lower half and of element 16 + j in its upper half.
The fifth bit of code j is bit j of the four bytes, the lowest bit of the first byte first.
Computed in float32: code * d is exact, adding m rounds once.

The types …_R4 and …_R8 of ik_llama.cpp interleave 4 or 8 rows: shared/ggml_interleaved.py.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_q4_0 … q8_0.
"""

import torch
from torch import Tensor

from quanterr.formats.base import Workspace
from quanterr.formats.shared.ggml_blocks import (
    BlockType,
    block_formats,
    code_buffer,
    expand_bits,
    look_up,
    read_half,
    split_nibbles,
)
from quanterr.formats.shared.ggml_interleaved import INTERLEAVED
from quanterr.kernel.levels import INT8


def q4_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q4_0 blocks: 18 bytes to 32 elements."""
    codes = _read_four_bits(raw, 2, workspace)
    out.copy_(codes.sub_(8)).mul_(read_half(raw, 0))


def q4_1(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q4_1 blocks: 20 bytes to 32 elements."""
    out.copy_(_read_four_bits(raw, 4, workspace)).mul_(read_half(raw, 0)).add_(read_half(raw, 2))


def q5_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q5_0 blocks: 22 bytes to 32 elements."""
    codes = _read_five_bits(raw, 2, workspace)
    out.copy_(codes.sub_(16)).mul_(read_half(raw, 0))


def q5_1(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q5_1 blocks: 24 bytes to 32 elements."""
    out.copy_(_read_five_bits(raw, 4, workspace)).mul_(read_half(raw, 0)).add_(read_half(raw, 2))


def q8_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q8_0 blocks: 34 bytes to 32 elements."""
    out.copy_(raw[:, 2:].view(torch.int8)).mul_(read_half(raw, 0))


def _read_four_bits(raw: Tensor, at: int, workspace: Workspace) -> Tensor:
    """Return the codes in the 16 bytes from ``at`` on, int8 (n, 32)."""
    codes = code_buffer(workspace, len(raw), 2, 16)
    codes[:, 0], codes[:, 1] = split_nibbles(raw, at, at + 16, workspace)
    return codes.view(torch.int8).view(-1, 32)


def _read_five_bits(raw: Tensor, at: int, workspace: Workspace) -> Tensor:
    """Return codes with their fifth bits in the 4 bytes from ``at`` on and the rest in the next 16, int8 (n, 32)."""
    codes = _read_four_bits(raw, at + 4, workspace)
    fifth = look_up(expand_bits(0, 16, raw.device), raw[:, at : at + 4], "fifth", workspace)
    codes.view(torch.int64).bitwise_or_(fifth)
    return codes


FORMATS = block_formats(
    (
        BlockType(
            "Q4_0",
            "4-bit codes, a scale for 32",
            q4_0,
            32,
            4,
            (21, 23),
            (2, 18),
            uniform=True,
            rows=INTERLEAVED["Q4_0"],
        ),
        BlockType("Q4_1", "4-bit codes, a scale and a minimum for 32", q4_1, 32, 4, (22, 24), (4, 20), uniform=True),
        BlockType(
            "Q5_0",
            "5-bit codes, a scale for 32",
            q5_0,
            32,
            5,
            (27, 29),
            (2, 22),
            uniform=True,
            rows=INTERLEAVED["Q5_0"],
        ),
        BlockType("Q5_1", "5-bit codes, a scale and a minimum for 32", q5_1, 32, 5, (28, 30), (4, 24), uniform=True),
        BlockType(
            "Q8_0", "8-bit codes, a scale for 32", q8_0, 32, 8, (44, 46), (2, 34), INT8, rows=INTERLEAVED["Q8_0"]
        ),
    ),
)
