"""GGUF: the KT types of ik_llama.cpp, whose codes are states of a generator of 8 or 4 numbers.

    bytes   IQ1_KT   scales 8, index 32, upper 16                blocks of 256 elements
            IQ2_KT   scales 4, index 64 (u16)
            IQ3_KT   scales 4, index 64 (u16), signs 32
            IQ4_KT   words 32 (u32), index 64, upper 32

    element = (d * scale) * level; a scale for 32 elements, d float32 before the blocks of each row

A state x, from index + 4096 on, becomes 3417055213 x modulo 2^32 for each element; the level is the sum of the lower 6
bits of its four bytes, less 126; in IQ3_KT its magnitude, with a bit of signs. Indices have 13, 16, 16 and 15 bits and
stand for 8 elements, in IQ4_KT for 4.

    scale    IQ1_KT, IQ2_KT   the levels of IQ4_NL, by half a byte
             IQ3_KT           half a byte
             IQ4_KT           bits 1 to 7 of a word, less 64

IQ1_KT: the upper half of a byte of scales has the highest bits of four indices. IQ4_KT: bit 0 of a word adds 32768 to
eight indices, and bits 8 to 31 are the highest three of each. The other places are below, in the notation of
shared/ggml_fields.py. Each operation rounds to float32.

Reference: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp QuantizerIQKT::set_values,
dequantize_row_iq1_kt … iq4_kt.
"""

from functools import cache

import torch
from torch import Tensor

from quanterr.formats.base import Workspace
from quanterr.formats.shared.ggml_blocks import IQ4, BlockType, StoredRows, block_formats, look_up, pack_integers
from quanterr.formats.shared.ggml_fields import Field, gather

FACTOR, FIRST = 0xCBAC1FED, 4096
OF_32, OF_8, OF_4, OF_1 = (
    range(7, 4, -1),
    range(7, 2, -1),
    range(7, 1, -1),
    range(7, -1, -1),
)  # bits of an element's index


def iq1_kt(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ1_KT blocks: 56 bytes to 256 elements."""
    lower = gather((Field(8, "76543"),), raw, 1, OF_8, "lower", workspace)
    upper = gather((Field(40, "6543:7", 4), Field(0, "765:H43", 1, 4)), raw, 1, OF_8, "upper", workspace)
    scales = gather((Field(0, "765", mask=15),), raw, 1, OF_32, "scales", workspace)
    _generate(lower + upper.int() * 256, 8, out, workspace)
    _scale(out, heads, _make_scales(raw.device)[scales.int()])


def iq2_kt(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ2_KT blocks: 68 bytes to 256 elements."""
    _generate(_read_indices(raw), 8, out, workspace)
    scales = gather((Field(0, "65:7", 4),), raw, 1, OF_32, "scales", workspace)
    _scale(out, heads, _make_scales(raw.device)[scales.int()])


def iq3_kt(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ3_KT blocks: 100 bytes to 256 elements."""
    _generate(_read_indices(raw), 8, out, workspace)
    minus = gather((Field(68, "43210:765", 1),), raw, 1, OF_1, "signs", workspace)
    out.abs_().mul_(minus.view(torch.int8).mul_(-2).add_(1))
    _scale(out, heads, gather((Field(0, "65:7", 4),), raw, 1, OF_32, "scales", workspace))


def iq4_kt(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ4_KT blocks: 128 bytes to 256 elements."""
    words = raw[:, :, :32].contiguous().view(torch.int32)
    lower = gather((Field(32, "765432"),), raw, 1, OF_4, "lower", workspace)
    upper = gather((Field(96, "65432:7", 4),), raw, 1, OF_4, "upper", workspace)
    highest = words.unsqueeze(3) >> torch.arange(8, 32, 3, dtype=torch.int32, device=raw.device) & 7
    highest = highest.bitwise_left_shift_(12).add_((words & 1).unsqueeze(3) << 15)
    _generate(lower + upper.int() * 256 + highest.view(lower.shape), 4, out, workspace)
    _scale(out, heads, (words >> 1 & 127).unsqueeze(1) - 64)


def _read_indices(raw: Tensor) -> Tensor:
    """Read the 32 indices of 16 bits from byte 4 of each block on, int32 (groups, blocks, 32)."""
    return raw[:, :, 4:68].contiguous().view(torch.int16).int() & 0xFFFF


def _generate(indices: Tensor, each: int, out: Tensor, workspace: Workspace) -> None:
    """Write the ``each`` levels of every index."""
    levels = look_up(_make_levels(each, out.device), indices.view(-1), "levels", workspace)
    out.copy_(levels.view(torch.int8).view(out.shape))


def _scale(out: Tensor, heads: Tensor | None, scales: Tensor) -> None:
    """Multiply by the scales of 32 elements, (groups, 1, blocks, 8), times d."""
    if heads is not None:
        out.view(*out.shape[:3], 8, 32).mul_((heads.unsqueeze(3) * scales).unsqueeze(4))


@cache
def _make_scales(device: torch.device) -> Tensor:
    """Return the scales of four bits, float32 (16,)."""
    return torch.tensor(IQ4, dtype=torch.float32, device=device)


@cache
def _make_levels(each: int, device: torch.device) -> Tensor:
    """Return the levels of each index, int8, packed in an integer: (65536,)."""
    state, levels = torch.arange(1 << 16) + FIRST, []
    for _ in range(each):
        state = state * FACTOR & 0xFFFFFFFF
        levels.append((state & 63) + (state >> 8 & 63) + (state >> 16 & 63) + (state >> 24 & 63))
    return pack_integers((torch.stack(levels, 1) - 126).to(torch.int8)).to(device)


FORMATS = block_formats(
    BlockType(name, summary, None, 32, bits, usual_db, rows={name: StoredRows(unpack)})
    for name, summary, unpack, bits, usual_db in (
        ("IQ1_KT", "13 bits for 8 from a generator, a scale for 32 and the row", iq1_kt, 2, (6, 8)),
        ("IQ2_KT", "16 bits for 8 from a generator, a scale for 32 and the row", iq2_kt, 2, (9, 11)),
        ("IQ3_KT", "16 bits for 8 from a generator, signs, a scale for 32 and the row", iq3_kt, 3, (15, 17)),
        ("IQ4_KT", "15 bits for 4 from a generator, a scale for 32 and the row", iq4_kt, 4, (20, 22)),
    )
)
