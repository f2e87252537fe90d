"""GGUF: one or two bits per element without a table: TQ1_0, TQ2_0, Q1_0, Q2_0, I2_S, IQ1_BN and IQ2_BN.

    bytes   TQ1_0     codes 48, codes 4, d f16      blocks of 256 elements
            TQ2_0     codes 64, d f16               256
            Q1_0      d f16, codes 16               128
            Q2_0      d f16, codes 16               64
            I2_S      codes 32                      128
            IQ1_BN    codes 12, code 1              64
            IQ2_BN    codes 16                      64

    all but Q1_0          element = (code - 1) * d, exact in float32
    Q1_0                  element = d if the bit is set, else -d

TQ2_0: byte l of the 32 bytes for half a block holds the codes of elements l, 32 + l, 64 + l and 96 + l of that half,
the lowest bits first. Q1_0 and Q2_0: the elements in order, the lowest bits first.

TQ1_0: a byte b holds five codes of three values: code k is (b · 3^k mod 256) · 3 // 256. Code k of byte l below 32
belongs to element 32k + l, of byte 32 + l to element 160 + 16k + l, and of byte l of the last four, which hold four
codes each, to element 240 + 4k + l.

I2_S (BitNet): byte j holds the codes of elements j, 32 + j, 64 + j and 96 + j, the highest bits first. The scale of the
tensor, float32, follows all blocks, in 32 bytes. BitNet's program for ARM packs blocks of 64 elements under the same
id, and nothing in the file shows it: such weights are read wrong and have large errors.

IQ1_BN: each of the first 12 bytes holds five codes of three values, in order: code k of a byte b is
(v + v // 2) // 128 for v = b · 3^(4-k) mod 256. After each 15 elements from three bytes comes one from the last byte.
IQ2_BN: byte j holds the codes of elements j, 16 + j, 32 + j and 48 + j, the lowest bits first; IQ2_BN_R4 interleaves
four rows, as below in the notation of shared/ggml_fields.py. Before the blocks of a row is its d, float16 or float32.

A fork of llama.cpp (PrismML) stores blocks of 128 elements in 34 bytes under the id of Q2_0. Such a file is refused:
its tensors are not at the offsets that Q2_0 implies.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_tq1_0, tq2_0, q1_0, q2_0;
ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp dequantize_row_iq1_bn, iq2_bn, iq2_bn_r4.
"""

from functools import cache, partial
from struct import unpack

import torch
from msgspec.structs import replace
from torch import Tensor

from quanterr.formats.base import Chunk, Format, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared.ggml_blocks import (
    BlockType,
    StoredRows,
    block_formats,
    code_buffer,
    dequantize,
    expand_bits,
    fit,
    look_up,
    pack_integers,
    read_half,
    split_fields,
)
from quanterr.formats.shared.ggml_fields import IN_HEAD, Field, Layout, Numbers, store_rows
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


def iq1_bn(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ1_BN blocks: 13 bytes to 64 elements."""
    codes = _make_fives(raw.device)[raw.int()]  # (groups, blocks, 13, 5)
    sixteens = out.view(*out.shape[:3], 4, 16)
    sixteens[..., :15] = codes[:, :, :12].reshape(*sixteens.shape[:4], 15)
    sixteens[..., 15] = codes[:, :, 12, :4].unsqueeze(1)
    if heads is not None:
        out.mul_(heads.unsqueeze(3))


def i2_s(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize I2_S blocks without the tensor's scale: 32 bytes to 128 elements."""
    codes = code_buffer(workspace, len(raw), 4, 32)
    for quarter, field in enumerate(split_fields(raw, 0, 32, 2, workspace)):
        codes[:, 3 - quarter] = field
    out.copy_(codes.view(torch.int8).sub_(1).view(-1, 128))


def fit_i2_s(parts: Parts) -> Weight:
    """Return the weight, whose codes and scale are one tensor."""
    weight = fit(I2_S, parts)
    return replace(weight, dequantize=partial(dequantize_i2_s, parts), block_size=None)


def dequantize_i2_s(parts: Parts, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the elements of a chunk, (r, c)."""
    entry = parts.codes
    (scale,) = unpack("<f", entry.file.read(entry.offset + entry.n // 4, 4))
    return Values(dequantize(parts, i2_s, chunk, workspace).weight.mul_(scale))


@cache
def _make_fives(device: torch.device) -> Tensor:
    """Return the five codes of each byte less one, int8 (256, 5)."""
    numbers = torch.arange(256)[:, None] * torch.tensor([81, 27, 9, 3, 1]) % 256
    return ((numbers + numbers // 2) // 128 - 1).to(torch.int8).to(device)


@cache
def _make_two_bits_table(device: torch.device) -> Tensor:
    """Return the four codes in each byte minus one, int8, lowest first, packed in an int32: (256,)."""
    codes = (torch.arange(256)[:, None] >> torch.arange(0, 8, 2)) % 4 - 1
    return pack_integers(codes.to(torch.int8)).to(device)


I2_S = BlockType("I2_S", "three values in 2 bits, a scale for the tensor", i2_s, 128, 2, (1, 3), (0, 32), TERNARY)

FORMATS = block_formats(
    (
        BlockType("TQ1_0", "three values, a scale for 256", tq1_0, 256, 2, (1, 3), (0, 52), BASE_3),
        BlockType("TQ2_0", "three values in 2 bits, a scale for 256", tq2_0, 256, 2, (1, 3), (0, 64), TERNARY),
        BlockType("Q1_0", "signs, a scale for 128", q1_0, 128, 1, (4, 5), (2, 18), uniform(1)),
        BlockType("Q2_0", "2-bit codes, a scale for 64", q2_0, 64, 2, (2, 4), (2, 18), uniform=True),
        BlockType(
            "IQ1_BN",
            "three values, a scale for the row",
            None,
            0,
            2,
            (1, 3),
            levels=BASE_3,
            rows={"IQ1_BN": StoredRows(iq1_bn, (0, 13))},
        ),
        BlockType(
            "IQ2_BN",
            "three values in 2 bits, a scale for the row",
            None,
            0,
            2,
            (1, 3),
            levels=TERNARY,
            rows=store_rows(
                Numbers((-1, 0, 1, 2), 64),
                {
                    "IQ2_BN": Layout((Field(0, "3210:54", 2),), d=IN_HEAD),
                    "IQ2_BN_R4": Layout((Field(0, "54kk10:32", 2),), d=IN_HEAD),
                },
            ),
        ),
    ),
)
FORMATS += (
    Format(
        I2_S.format,
        {"codes": PartSpec(("{weight}",), frozenset({"I2_S"}))},
        fit_i2_s,
        summary=I2_S.summary,
        usual_db=I2_S.usual_db,
    ),
)
