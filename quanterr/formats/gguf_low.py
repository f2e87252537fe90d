"""GGUF: one or two bits per element without a table: TQ1_0, TQ2_0, Q1_0, Q2_0, PQ2_0, PTQ1_0, I2_S, IQ1_BN, IQ2_BN.

    bytes   TQ1_0     codes 48, codes 4, d f16      blocks of 256 elements
            TQ2_0     codes 64, d f16               256
            Q1_0      d f16, codes 16               128
            Q2_0      d f16, codes 16               64
            PQ2_0     d f16, codes 32               128
            PTQ1_0    codes 24, codes 2, d f16      128
            I2_S      codes 32                      128
            IQ1_BN    codes 12, code 1              64
            IQ2_BN    codes 16                      64

    all but Q1_0          element = (code - 1) * d, exact in float32
    Q1_0                  element = d if the bit is set, else -d

TQ2_0: byte l of the 32 bytes for half a block holds the codes of elements l, 32 + l, 64 + l and 96 + l of that half,
the lowest bits first. Q1_0, Q2_0 and PQ2_0: the elements in order, the lowest bits first.

TQ1_0: a byte b holds five codes of three values: code k is (b · 3^k mod 256) · 3 // 256. Code k of byte l below 32
belongs to element 32k + l, of byte 32 + l to element 160 + 16k + l, and of byte l of the last four, which hold four
codes each, to element 240 + 4k + l. PTQ1_0 has the same order, from 16 bytes, 8 and the last two.

I2_S (BitNet): byte j holds the codes of elements j, 32 + j, 64 + j and 96 + j, the highest bits first. The scale of the
tensor, float32, follows all blocks, in 32 bytes. BitNet's program for ARM packs blocks of 64 elements under the same
id, and nothing in the file shows it: such weights are read wrong and have large errors.

IQ1_BN: each of the first 12 bytes holds five codes of three values, in order: code k of a byte b is
(v + v // 2) // 128 for v = b · 3^(4-k) mod 256. After each 15 elements from three bytes comes one from the last byte.
IQ2_BN: byte j holds the codes of elements j, 16 + j, 32 + j and 48 + j, the lowest bits first; IQ2_BN_R4 interleaves
four rows, as below in the notation of shared/ggml_fields.py. Before the blocks of a row is its d, float16 or float32.

PQ2_0 and PTQ1_0 are types of a fork of llama.cpp (PrismML), whose weights are rotated: pairing/prism.py undoes that.
Older files of this fork have PQ2_0's blocks under the id of Q2_0. Such a file is refused: its tensors are not at the
offsets that Q2_0 implies.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_tq1_0, tq2_0, q1_0, q2_0;
ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp dequantize_row_iq1_bn, iq2_bn, iq2_bn_r4;
PrismML-Eng/llama.cpp (branch prism) ggml/src/ggml-quants.c dequantize_row_pq2_0, ptq1_0.
"""

from functools import partial
from struct import unpack

from msgspec.structs import replace

from quanterr.checkpoints.ggml_types import OF_NAME
from quanterr.formats.base import Format, Parts, PartSpec, Weight
from quanterr.formats.shared.ggml_blocks import BlockType, fit, make_block_formats, make_decoder
from quanterr.formats.shared.ggml_fields import IN_HEAD, Block, Field, Layout, Numbers
from quanterr.kernel.interpreter import Native
from quanterr.kernel.levels import TERNARY, Levels, uniform
from quanterr.lazy_torch import Tensor, torch

BASE_3 = Levels(0x00, 0xFF, -1.0, 1.0)  # five codes in a byte


def rewrite_base_3(runs: tuple[int, int, int], raw: Tensor) -> Tensor:
    """Return blocks, uint8 (groups, blocks, bytes), with a byte for each code, then d.

    ``runs`` are the bytes of which each holds five codes, twice, and of those that hold four.
    """
    n, powers = sum(runs), torch.tensor([1, 3, 9, 27, 81], device=raw.device)[:, None]
    codes = (raw[..., None, :n].int() * powers % 256 * 3 >> 8).to(torch.uint8)  # (…, 5, n)
    a, b = runs[0], runs[0] + runs[1]
    parts = codes[..., :a], codes[..., a:b], codes[..., :4, b:]
    return torch.cat([*(part.flatten(-2) for part in parts), raw[..., n:]], -1)


def rewrite_iq1_bn(raw: Tensor) -> Tensor:
    """Return blocks of IQ1_BN, uint8 (groups, blocks, 13), with a byte for each of 64 codes."""
    powers = torch.tensor([81, 27, 9, 3, 1], device=raw.device)
    numbers = raw.unsqueeze(-1).int() * powers % 256
    codes = ((numbers + numbers // 2) // 128).to(torch.uint8)  # (…, 13, 5)
    fifteens, last = codes[..., :12, :].reshape(*raw.shape[:-1], 4, 15), codes[..., 12, :4]
    return torch.cat([fifteens, last.unsqueeze(-1)], -1).flatten(-2)


def rewrite_i2_s(raw: Tensor) -> Tensor:
    """Return blocks of I2_S, uint8 (groups, blocks, 32), with a byte for each of 128 codes."""
    return torch.cat([raw >> shift & 3 for shift in (6, 4, 2, 0)], -1)


def fit_i2_s(parts: Parts) -> Weight:
    """Return the weight, whose codes and scale are one tensor."""
    entry, weight = parts.codes, fit(I2_S, parts)
    (scale,) = unpack("<f", entry.file.read(entry.offset + entry.n // 4, 4))
    decoder = make_decoder(parts, I2_S.blocks["I2_S"], OF_NAME["I2_S"])
    return replace(weight, dequantize=Native(replace(decoder, factor=scale)), block_size=None)


LEVELS = (-1, 0, 1, 2)  # types of ternary codes have three values
A_BYTE = "76543210"
I2_S = BlockType(
    "three values in 2 bits, a scale for the tensor",
    (1, 3),
    {"I2_S": Block(Numbers(128, LEVELS), Layout((Field(0, A_BYTE[1:], mask=3),), d=None), rewrite_i2_s)},
    TERNARY,
    codes=(0, 32),
)

TYPES = (
    BlockType(
        "three values, a scale for 256",
        (1, 3),
        {
            "TQ1_0": Block(
                Numbers(256, LEVELS), Layout((Field(0, A_BYTE, mask=3),), d=256), partial(rewrite_base_3, (32, 16, 4))
            )
        },
        BASE_3,
        codes=(0, 52),
    ),
    BlockType(
        "three values in 2 bits, a scale for 256",
        (1, 3),
        {"TQ2_0": Block(Numbers(256, LEVELS), Layout((Field(0, "743210:65", 2),), d=64))},
        TERNARY,
    ),
    BlockType(
        "signs, a scale for 128",
        (4, 5),
        {"Q1_0": Block(Numbers(128, (-1, 1)), Layout((Field(2, "6543:210", 1),)))},
        uniform(1),
    ),
    BlockType(
        "2-bit codes, a scale for 64",
        (2, 4),
        {"Q2_0": Block(Numbers(64, LEVELS), Layout((Field(2, "5432:10", 2),)))},
    ),
    BlockType(
        "three values in 2 bits, a scale for 128 (PrismML)",
        (1, 3),
        {"PQ2_0": Block(Numbers(128, LEVELS), Layout((Field(2, "65432:10", 2),)))},
    ),
    BlockType(
        "three values, a scale for 128 (PrismML)",
        (1, 3),
        {
            "PTQ1_0": Block(
                Numbers(128, LEVELS),
                Layout((Field(0, A_BYTE[1:], mask=3),), d=128),
                partial(rewrite_base_3, (16, 8, 2)),
            )
        },
        BASE_3,
        codes=(0, 26),
    ),
    BlockType(
        "three values, a scale for the row",
        (1, 3),
        {"IQ1_BN": Block(Numbers(64, LEVELS), Layout((Field(0, A_BYTE[2:], mask=3),), d=IN_HEAD), rewrite_iq1_bn)},
        BASE_3,
        codes=(0, 13),
    ),
    BlockType(
        "three values in 2 bits, a scale for the row",
        (1, 3),
        {
            "IQ2_BN": Block(Numbers(64, LEVELS), Layout((Field(0, "3210:54", 2),), d=IN_HEAD)),
            "IQ2_BN_R4": Block(Numbers(64, LEVELS), Layout((Field(0, "54kk10:32", 2),), d=IN_HEAD)),
        },
        TERNARY,
    ),
)
FORMATS = make_block_formats(TYPES)
FORMATS += (
    Format(
        I2_S.format,
        {"codes": PartSpec(("{weight}",), frozenset({"I2_S"}))},
        fit_i2_s,
        summary=I2_S.summary,
        usual_db=I2_S.usual_db,
    ),
)
