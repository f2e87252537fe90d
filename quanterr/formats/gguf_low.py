"""GGUF: one or two bits per element without a table: TQ1_0, TQ2_0, Q1_0 and Q2_0.

    bytes   TQ1_0     codes 48, codes 4, d f16      blocks of 256 elements
            TQ2_0     codes 64, d f16               256
            Q1_0      d f16, codes 16               128
            Q2_0      d f16, codes 16               64

    TQ1_0, TQ2_0, Q2_0    element = (code - 1) * d, exact in float32
    Q1_0                  element = d if the bit is set, else -d

TQ2_0: byte l of the 32 bytes for half a block holds the codes of elements l, 32 + l, 64 + l and 96 + l of that half,
the lowest bits first. Q1_0 and Q2_0: the elements in order, the lowest bits first.

TQ1_0: a byte b holds five codes of three values: code k is (b · 3^k mod 256) · 3 // 256. Code k of byte l below 32
belongs to element 32k + l, of byte 32 + l to element 160 + 16k + l, and of byte l of the last four, which hold four
codes each, to element 240 + 4k + l.

A fork of llama.cpp (PrismML) stores blocks of 128 elements in 34 bytes under the id of Q2_0. Such a file is refused:
its tensors are not at the offsets that Q2_0 implies.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_tq1_0, tq2_0, q1_0, q2_0.
"""

from functools import cache

import torch
from torch import Tensor

from quanterr.formats.base import Workspace
from quanterr.formats.shared.ggml_blocks import (
    BlockType,
    block_formats,
    code_buffer,
    expand_bits,
    look_up,
    pack_integers,
    read_half,
    split_fields,
)
from quanterr.kernel.levels import TERNARY, Levels, uniform

BASE_3 = Levels(0x00, 0xFF, -1.0, 1.0)  # five codes in a byte


def tq1_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize TQ1_0 blocks: 54 bytes to 256 elements."""
    n = len(raw)
    codes = code_buffer(workspace, n, 256)
    shape = n, 52
    packed = workspace.buffer("packed", shape, torch.uint8).copy_(raw[:, :52])
    wide = workspace.buffer("wide", shape, torch.int16)
    for k in range(5):
        wide.copy_(packed).mul_(3).bitwise_right_shift_(8)
        codes[:, 32 * k : 32 * k + 32] = wide[:, :32]
        codes[:, 160 + 16 * k : 176 + 16 * k] = wide[:, 32:48]
        if k < 4:
            codes[:, 240 + 4 * k : 244 + 4 * k] = wide[:, 48:]
        packed.mul_(3)  # modulo 256
    out.copy_(codes.view(torch.int8).sub_(1)).mul_(read_half(raw, 52))


def tq2_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize TQ2_0 blocks: 66 bytes to 256 elements."""
    codes = code_buffer(workspace, len(raw), 2, 4, 32)
    for quarter, field in enumerate(split_fields(raw, 0, 64, 2, workspace)):
        codes[:, :, quarter] = field.view(-1, 2, 32)
    out.copy_(codes.view(torch.int8).sub_(1).view(-1, 256)).mul_(read_half(raw, 64))


def q1_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q1_0 blocks: 18 bytes to 128 elements."""
    signs = look_up(expand_bits(-1, 1, raw.device), raw[:, 2:], "signs", workspace)
    out.copy_(signs.view(torch.int8)).mul_(read_half(raw, 0))


def q2_0(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize Q2_0 blocks: 18 bytes to 64 elements."""
    codes = look_up(_make_two_bits_table(raw.device), raw[:, 2:], "codes", workspace)
    out.copy_(codes.view(torch.int8)).mul_(read_half(raw, 0))


@cache
def _make_two_bits_table(device: torch.device) -> Tensor:
    """Return the four codes in each byte minus one, int8, lowest first, packed in an int32: (256,)."""
    codes = (torch.arange(256)[:, None] >> torch.arange(0, 8, 2)) % 4 - 1
    return pack_integers(codes.to(torch.int8)).to(device)


FORMATS = block_formats(
    (
        BlockType("TQ1_0", "three values, a scale for 256", tq1_0, 256, 2, (1, 3), (0, 52), BASE_3),
        BlockType("TQ2_0", "three values in 2 bits, a scale for 256", tq2_0, 256, 2, (1, 3), (0, 64), TERNARY),
        BlockType("Q1_0", "signs, a scale for 128", q1_0, 128, 1, (4, 5), (2, 18), uniform(1)),
        BlockType("Q2_0", "2-bit codes, a scale for 64", q2_0, 64, 2, (2, 4), (2, 18), uniform=True),
    ),
)
