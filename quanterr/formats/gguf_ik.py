"""GGUF: the types of ik_llama.cpp with codes of 2 to 8 bits. Most have a table of levels that each part can shift.

    bytes   IQ2_K    d f16, shifted 2, scales 8, codes 64                              blocks of 256 elements
            IQ3_K    d f16, shifted 2, signs 2, scales 8, codes 64, third 32
            IQ4_K    d f16, shifted 2, upper scales 4, scales 8, codes 128
            IQ5_K    d f16, shifted 2, upper scales 4, scales 8, codes 128, fifth 32
            IQ6_K    d f16, shifted 2, scales 16 i8, codes 128, upper 64
            IQ2_KS   shifted 1, upper scales 1, scales 4, codes 64
            IQ3_KS   upper scales 1, shifted 1, scales 4, codes 64, third 32
            IQ4_KS   scales 8, codes 128
            IQ5_KS   scales 8, codes 128, fifth 32
            IQ4_KSS  codes 128
            IQ2_KL   upper scales 2, scales 4, codes 64, fifth 16
            Q6_0     d f16, upper 8, codes 16                                          blocks of 32 elements
            Q8_KV    codes 32 i8
            Q8_K_R8, Q8_K_R16   d 8 or 16 f16, codes 256 i8 of 8 rows, or u8 of 16         blocks of 256 elements

    IQ…_K    element = (d * scale) * (level + shift, if shifted), a scale for 16 elements
    others   the same, a scale for 32 elements
    Q6_0     element = (code - 32) * d
    Q8_K…    element = code * d; in Q8_K_R16 (code - 128) * d

Before the blocks of each row of IQ2_KS, IQ3_KS and IQ2_KL is its d, float16, of IQ4_KS, IQ5_KS and IQ4_KSS its d,
float32, and of Q8_KV its d, float32, and 4 unused bytes. The types …_R4 and …_R8 interleave 4 or 8 rows.

The places of all bits are LAYOUTS below, in the notation of shared/ggml_fields.py; levels, shifts and the offsets of
scales are NUMBERS. IQ6_K: ((code * 0.0011972 - 0.11218) * code + 6.2568) * code - 127, each operation rounded to
float32; kernels that multiply matrices round it to an integer. A code of IQ2_KL gives two elements.

IQ4_KSS: 64 words of 16 bits. The lowest bits of 8 words are the scale byte that IQ4_KS has for these 32 elements, and
what is left of a word, w ^ w >> 1, is two bytes of its codes.

Each operation rounds to float32: for a float16 d the last one alone.

Reference: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp dequantize_row_iq2_k … q8_KV_r8,
ggml/src/ggml-quants.c dequantize_row_q6_0.
"""

import struct
from functools import cache

from quanterr.formats.shared.ggml_blocks import IQ4, BlockType, make_block_formats
from quanterr.formats.shared.ggml_fields import IN_HEAD, Block, Field, Layout, Numbers
from quanterr.lazy_torch import Tensor, torch

IQ2 = (-31, -13, 1, 17)
IQ3 = (-63, -40, -23, -10, 1, 13, 28, 47)
IQ5 = (
    -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
    -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121,
)  # fmt: skip
IQ2_PAIRS = (
    (-63, -23), (-63, 13), (-40, -63), (-40, -10), (-40, 13), (-40, 47), (-23, -40), (-23, -23),
    (-23, 1), (-23, 13), (-23, 28), (-10, -63), (-10, 1), (-10, 13), (-10, 47), (1, -23),
    (1, -10), (1, 1), (1, 13), (1, 28), (13, -40), (13, -23), (13, -10), (13, 1),
    (13, 13), (28, -63), (28, -23), (28, 1), (28, 28), (28, 47), (47, -23), (47, 13),
)  # fmt: skip


def _make_iq6() -> tuple[float, ...]:
    """Return the levels of 6-bit codes: a polynomial in float32."""
    a, b, c = map(_round_to_float32, (0.0011972, -0.11218, 6.2568))
    levels = [0.0] * 64
    for factor in (a, b, c, -127.0):
        levels = [_round_to_float32(_round_to_float32(level * code) + factor) for code, level in enumerate(levels)]
    return tuple(levels)


def _round_to_float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


@cache
def make_pairs() -> Tensor:
    """Return the levels of IQ2_KL's codes, int8 (32, 2)."""
    return torch.tensor(IQ2_PAIRS, dtype=torch.int8)


NUMBERS = {
    "IQ2_K": Numbers(16, IQ2, offset=-8, shift=5),
    "IQ3_K": Numbers(16, IQ3, 2, 1, shift=4),
    "IQ4_K": Numbers(16, IQ4, offset=-32, shift=4),
    "IQ5_K": Numbers(16, IQ5, offset=-32, shift=2),
    "IQ6_K": Numbers(16, _make_iq6(), shift=1, signed=True),
    "IQ2_KS": Numbers(32, IQ2, offset=-16, shift=5),
    "IQ3_KS": Numbers(32, IQ3, offset=-16, shift=4),
    "IQ4_KS": Numbers(32, IQ4, offset=-127, shift=4),
    "IQ5_KS": Numbers(32, IQ5, offset=-127, shift=2),
    "IQ2_KL": Numbers(32, offset=-32, width=2, grid=make_pairs),
    "Q6_0": Numbers(32, tuple(range(-32, 32))),
    "Q8_KV": Numbers(32),
    "Q8_K_R8": Numbers(256),
    "Q8_K_R16": Numbers(256, tuple(range(-128, 128))),
}

FLAGS = (Field(2, "7:654", 1),)
SCALES = Field(8, "765:4", 4), Field(4, "76:54", 2, 4)
OF_32 = (Field(0, "765", mask=254),), (Field(0, "765", 1),)
FLAGS_R4 = (Field(8, "4kk:765", 1),)
SCALES_R4 = Field(32, "654kk:7", 4), Field(16, "54kk:76", 2, 4)
OF_32_R4 = (Field(0, "765kk", mask=254),), (Field(0, "765kk", 1),)
LAYOUTS = {
    "IQ2_K": Layout((Field(12, "743210:65", 2),), (Field(4, "765:4", 4),), FLAGS),
    "IQ3_K": Layout(
        (Field(14, "743210:65", 2), Field(78, "43210:765", 1, 2)),
        (Field(6, "765:4", 4),),
        FLAGS,
        signs=(Field(4, "7:654", 1),),
    ),
    "IQ4_K": Layout((Field(16, "7653210:4", 4),), SCALES, FLAGS),
    "IQ5_K": Layout((Field(16, "7643210:5", 4), Field(144, "43210:765", 1, 4)), SCALES, FLAGS),
    "IQ6_K": Layout((Field(20, "7643210:5", 4), Field(148, "743210:65", 2, 4)), (Field(4, "7654"),), FLAGS),
    "IQ2_KS": Layout(
        (Field(6, "743210:65", 2),), (Field(2, "76:5", 4), Field(1, ":765", 1, 4)), (Field(0, ":765", 1),), d=IN_HEAD
    ),
    "IQ3_KS": Layout(
        (Field(6, "743210:65", 2), Field(70, "43210:765", 1, 2)),
        (Field(2, "65:7", 4), Field(0, ":765", 1, 4)),
        (Field(1, ":765", 1),),
        d=IN_HEAD,
    ),
    "IQ4_KS": Layout((Field(8, "7653210:4", 4),), *OF_32, d=IN_HEAD),
    "IQ5_KS": Layout((Field(8, "7643210:5", 4), Field(136, "43210:765", 1, 4)), *OF_32, d=IN_HEAD),
    "IQ2_KL": Layout(
        (Field(6, "764321:5", 4), Field(70, "4321:765", 1, 4)),
        (Field(2, "65:7", 4), Field(0, "7:65", 2, 4)),
        d=IN_HEAD,
    ),
    "Q6_0": Layout((Field(10, "3210:4", 4), Field(2, "210:34", 2, 4))),
    "Q8_KV": Layout((Field(0, "43210"),), d=IN_HEAD),
    "IQ2_K_R4": Layout((Field(48, "7654kk10:32", 2),), (Field(16, "654kk:7", 4),), FLAGS_R4),
    "IQ3_K_R4": Layout(
        (Field(56, "7654kk10:32", 2), Field(312, "765kk10:432", 1, 2)),
        (Field(24, "654kk:7", 4),),
        FLAGS_R4,
        signs=(Field(16, "4kk:765", 1),),
    ),
    "IQ4_K_R4": Layout((Field(64, "76524kk10:3", 4),), SCALES_R4, FLAGS_R4),
    "IQ5_K_R4": Layout((Field(64, "76524kk10:3", 4), Field(576, "765kk10:243", 1, 4)), SCALES_R4, FLAGS_R4),
    "IQ4_KS_R4": Layout((Field(32, "76524kk10:3", 4),), *OF_32_R4, d=IN_HEAD),
    "IQ5_KS_R4": Layout((Field(32, "76524kk10:3", 4), Field(544, "765kk10:243", 1, 4)), *OF_32_R4, d=IN_HEAD),
    "Q6_0_R4": Layout((Field(40, "24kk10:3", 4), Field(8, "4kk10:32", 2, 4))),
    "Q8_KV_R8": Layout((Field(0, "432kkk10"),), d=IN_HEAD),
    "Q8_K_R8": Layout((Field(16, "765432kkk10"),)),
    "Q8_K_R16": Layout((Field(32, "765432kkkk10"),)),
}
BLOCKS = {name: Block(NUMBERS.get(name) or NUMBERS[name.split("_R")[0]], layout) for name, layout in LAYOUTS.items()}


def rewrite_iq4_kss(raw: Tensor) -> Tensor:
    """Return blocks of IQ4_KSS, uint8 (groups, blocks, 128), as blocks of IQ4_KS, (groups, blocks, 136)."""
    words = raw.contiguous().view(torch.int16)
    bits = (words & 1).view(*raw.shape[:2], 8, 8) << torch.arange(8, dtype=torch.int16, device=raw.device)
    codes = words & -2
    codes = codes ^ (codes >> 1 & 0x7FFF)
    return torch.cat([bits.sum(3).to(torch.uint8), codes.view(torch.uint8)], 2)


BLOCKS["IQ4_KSS"] = Block(NUMBERS["IQ4_KS"], LAYOUTS["IQ4_KS"], rewrite_iq4_kss)


TYPES = tuple(
    BlockType(summary, usual_db, {name: BLOCKS[name] for name in (name, *others)})
    for name, summary, usual_db, *others in (
        ("IQ2_K", "2-bit codes for a table, a scale for 16", (10, 12), "IQ2_K_R4"),
        ("IQ3_K", "3-bit codes for a table, a scale for 16", (17, 19), "IQ3_K_R4"),
        ("IQ4_K", "4-bit codes for a table, a 6-bit scale for 16", (23, 25), "IQ4_K_R4"),
        ("IQ5_K", "5-bit codes for a table, a 6-bit scale for 16", (29, 31), "IQ5_K_R4"),
        ("IQ6_K", "6-bit codes for a table, an 8-bit scale for 16", (35, 37)),
        ("IQ2_KS", "2-bit codes for a table, a scale for 32 and the row", (9, 11)),
        ("IQ3_KS", "3-bit codes for a table, a scale for 32 and the row", (16, 18)),
        ("IQ4_KS", "4-bit codes for a table, a scale for 32 and the row", (22, 24), "IQ4_KS_R4"),
        ("IQ5_KS", "5-bit codes for a table, a scale for 32 and the row", (28, 30), "IQ5_KS_R4"),
        ("Q6_0", "6-bit codes, a scale for 32", (33, 35), "Q6_0_R4"),
        ("Q8_KV", "8-bit codes, a scale for the row", (39, 43), "Q8_KV_R8"),
        ("Q8_K_R8", "8-bit codes, a scale for 256", (41, 43), "Q8_K_R16"),
        ("IQ4_KSS", "4-bit codes for a table, 15 bits for 4, a scale for 32 and the row", (19, 21)),
        ("IQ2_KL", "5-bit codes for pairs, a scale for 32 and the row", (12, 14)),
    )
)
FORMATS = make_block_formats(TYPES)
