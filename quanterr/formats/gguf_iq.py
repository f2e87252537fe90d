"""GGUF: the IQ types, whose codes index a grid: groups of 4 or 8 magnitudes that occur together.

    bytes, for 256 elements
    IQ1_S     d f16, index 32, upper 16 (u16)
    IQ1_M     index 32, upper 16, scales 8 (u16)
    IQ2_XXS   d f16, 8 times: index 4, signs and scale 4 (u32)
    IQ2_XS    d f16, index and signs 64 (u16), scales 8
    IQ2_S     d f16, index 32, signs 32, upper 8, scales 8
    IQ3_XXS   d f16, index 64, signs and scale 32 (u32)
    IQ3_S     d f16, index 64, upper 8, signs 32, scales 4

    IQ1       element = d * (2 * scale + 1) * (level + delta), delta 1/8 or -1/8; levels -1, 0, 1
    IQ2       element = d * (1/2 + scale) / 4 * level * sign; levels 8, 25, 43
    IQ3_XXS   element = d * (1/2 + scale) / 2 * level * sign; levels 4, 12, 20, 28, 36, 44, 52, 62
    IQ3_S     element = d * (2 * scale + 1) * level * sign; levels 1, 3, 5, 7, 9, 11, 13, 15

An entry has 8 levels (IQ3: 4); an index is for the next 8 (4) elements. All values are exact in float32.

IQ2_XXS, IQ3_XXS   the u32 of 32 elements: four times 7 signs, the lowest first, then a scale of 4 bits. The eighth
                   sign makes the number of minus signs even.
IQ2_XS             9 bits of index, then 7 signs, the eighth as above. A scale of 4 bits for 16 elements.
IQ2_S              2 more bits of each index in "upper", the lowest first; 8 signs per byte; scales as IQ2_XS.
IQ3_S              1 more bit of each index in "upper", the lowest first; 8 signs per byte; a scale of 4 bits for 32.
IQ1_S              the u16 of 32 elements: four times 3 more bits of index, a scale of 3 bits, and the sign of delta.
IQ1_M              half a byte for 8 elements: 3 more bits of index and the sign of delta. Each u16 of scales holds four
                   of 3 bits, for 16 elements each, and in its upper 4 bits a part of d, the lowest first.

Types …_R4 of ik_llama.cpp interleave four rows. IQ2_XXS_R4 and IQ3_XXS_R4: the lowest bits of four bytes are the scale,
and the rest b of each, b ^ b >> 1, are eight signs; IQ2_XS_R4: the same for the upper byte of a word, whose lowest bit
belongs to the index. IQ1_S_R4 and IQ1_M_R4 have d, float16, in front of the blocks of each row, and blocks of 32
elements; the element of IQ1_M_R4 is d * scale * (level + delta), with scales of 4 bits.

The places of all bits are below, in the notation of shared/ggml_fields.py.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_iq1_s … iq3_s; the grids:
shared/ggml_grids.py. Interleaved: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp
dequantize_row_iq1_s_r4 … iq3_s_r4.
"""

import base64
from functools import cache, partial

from quanterr.formats.shared.ggml_blocks import BlockType, make_block_formats
from quanterr.formats.shared.ggml_fields import IN_HEAD, Block, Field, Layout, Numbers
from quanterr.formats.shared.ggml_grids import GRIDS
from quanterr.lazy_torch import Tensor, torch

TERNARY = (-1, 0, 1)
IQ2 = (8, 25, 43)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
# Seven stored signs of a group: the eighth makes the number of negative elements even.
EVEN_SIGNS = tuple(signs | signs.bit_count() % 2 << 7 for signs in range(128))
SHIFTED = tuple((byte & 0xFE) ^ (byte & 0xFE) >> 1 for byte in range(256))


@cache
def decode_grid(name: str, levels: tuple[int, ...]) -> Tensor:
    """Return the levels of all entries of a grid, int8 (entries, 8 or 4)."""
    packed = torch.tensor(list(base64.b85decode(GRIDS[name])), dtype=torch.uint8)
    bits = 2 if len(levels) == 3 else 4
    numbers = (packed[:, None] >> torch.arange(0, 8, bits, dtype=torch.uint8)) % (1 << bits)
    return torch.tensor(levels, dtype=torch.int8)[numbers.long()].view(-1, 8 if bits == 2 else 4)


@cache
def shift_grid() -> Tensor:
    """Return 8 · (level + delta) for all IQ1 entries, first for a delta of 1/8, then of -1/8: int8 (4096, 8)."""
    eighths = 8 * decode_grid("IQ1_S", TERNARY)
    return torch.cat([eighths + 1, eighths - 1])


IQ1_S = Numbers(32, factor=2, offset=1, step=1 / 8, width=8, grid=shift_grid)
IQ1_M = IQ1_S._replace(part=16)
IQ2_XXS = Numbers(
    32, factor=2, offset=1, step=1 / 8, width=8, grid=partial(decode_grid, "IQ2_XXS", IQ2), patterns=EVEN_SIGNS
)
IQ2_XS = IQ2_XXS._replace(part=16, grid=partial(decode_grid, "IQ2_XS", IQ2))
IQ2_S = IQ2_XS._replace(grid=partial(decode_grid, "IQ2_S", IQ2), patterns=())
IQ3_XXS_NUMBERS = Numbers(
    32, factor=2, offset=1, step=1 / 4, width=4, grid=partial(decode_grid, "IQ3_XXS", IQ3_XXS), patterns=EVEN_SIGNS
)
IQ3_S_NUMBERS = Numbers(32, factor=2, offset=1, width=4, grid=partial(decode_grid, "IQ3_S", IQ3_S))
SCALE_R4 = tuple(Field(8, "765kk", 1, up, word=32, first=8 * up) for up in range(4))  # the lowest bits of four bytes
SIGNS_R4 = tuple(  # signs in IQ3_S_R4: those of elements j and 4 + j of a run of 32 are neighbours
    Field(296, "765kk:43", 2, up, mask=1, word=32, first=8 * (up % 4) + up // 4) for up in range(8)
)
TYPES = (
    BlockType(
        "a grid of 2048, a scale for 32",
        (5, 7),
        {
            "IQ1_S": Block(
                IQ1_S,
                Layout(
                    (
                        Field(2, "76543"),
                        Field(34, "765:43", 3, 8, word=16),
                        Field(34, "765", 1, 11, word=16, first=15),
                    ),
                    (Field(34, "765", 3, word=16, first=12),),
                ),
            ),
            "IQ1_S_R4": Block(
                IQ1_S,
                Layout(
                    (
                        Field(0, "43kk"),
                        Field(16, "kk:43", 3, 8, word=16),
                        Field(16, "kk", 1, 11, word=16, first=15),
                    ),
                    (Field(16, "kk", 3, word=16, first=12),),
                    d=IN_HEAD,
                ),
            ),
        },
    ),
    BlockType(
        "a grid of 2048, a scale for 16",
        (5, 7),
        {
            "IQ1_M": Block(
                IQ1_M,
                Layout(
                    (Field(0, "76543"), Field(32, "7654:3", 4, 8)),
                    (Field(48, "76:54", 3, word=16),),
                    d=tuple(Field(48 + 2 * part, "", 4, 4 * part, word=16, first=12) for part in range(4)),
                ),
            ),
            "IQ1_M_R4": Block(
                IQ1_M._replace(factor=1, offset=0),
                Layout((Field(0, "43kk"), Field(16, "4kk:3", 4, 8)), (Field(24, "kk:4", 4),), d=IN_HEAD),
            ),
        },
    ),
    BlockType(
        "a grid of 256, a scale for 32",
        (8, 10),
        {
            "IQ2_XXS": Block(
                IQ2_XXS,
                Layout(
                    (Field(2, "765L43"),),
                    (Field(2, "765", 4, word=64, first=60),),
                    minus=(Field(2, "765:43", 7, word=64, first=32),),
                ),
            ),
            "IQ2_XXS_R4": Block(
                IQ2_XXS._replace(patterns=SHIFTED),
                Layout((Field(136, "765kk43"),), SCALE_R4, minus=(Field(8, "765kk43", mask=0xFE),)),
            ),
        },
    ),
    BlockType(
        "a grid of 512, a scale for 16",
        (10, 12),
        {
            "IQ2_XS": Block(
                IQ2_XS,
                Layout(
                    (Field(2, "76543", 9, word=16),),
                    (Field(66, "765:4", 4),),
                    minus=(Field(2, "76543", 7, word=16, first=9),),
                ),
            ),
            "IQ2_XS_R4": Block(
                IQ2_XS._replace(patterns=SHIFTED),
                Layout(
                    (Field(8, "765kk43", 9, word=16),),
                    (Field(264, "765kk:4", 4),),
                    minus=(Field(8, "765kk43", mask=0xFE, word=16, first=8),),
                ),
            ),
        },
    ),
    BlockType(
        "a grid of 1024, a scale for 16",
        (11, 13),
        {
            "IQ2_S": Block(
                IQ2_S,
                Layout(
                    (Field(2, "76543"), Field(66, "765:43", 2, 8)),
                    (Field(74, "765:4", 4),),
                    minus=(Field(34, "76543"),),
                ),
            ),
            "IQ2_S_R4": Block(
                IQ2_S,
                Layout(
                    (Field(8, "765kk43"), Field(136, "765kk:43", 2, 8)),
                    (Field(296, "765kk:4", 4),),
                    minus=(Field(168, "765kk43"),),
                ),
            ),
        },
    ),
    BlockType(
        "a grid of 256 by fours, a scale for 32",
        (14, 16),
        {
            "IQ3_XXS": Block(
                IQ3_XXS_NUMBERS,
                Layout(
                    (Field(2, "765432"),),
                    (Field(66, "765", 4, word=32, first=28),),
                    minus=(Field(66, "765:43", 7, word=32),),
                ),
            ),
            "IQ3_XXS_R4": Block(
                IQ3_XXS_NUMBERS._replace(patterns=SHIFTED),
                Layout((Field(136, "765kk432"),), SCALE_R4, minus=(Field(8, "765kk43", mask=0xFE),)),
            ),
        },
    ),
    BlockType(
        "a grid of 512 by fours, a scale for 32",
        (16, 18),
        {
            "IQ3_S": Block(
                IQ3_S_NUMBERS,
                Layout(
                    (Field(2, "765432"), Field(66, "765:432", 1, 8)),
                    (Field(106, "76:5", 4),),
                    minus=(Field(74, "76543"),),
                ),
            ),
            "IQ3_S_R4": Block(
                IQ3_S_NUMBERS,
                Layout(
                    (Field(8, "765324kk"), Field(264, "765kk:432", 1, 8)),
                    (Field(424, "65kk:7", 4),),
                    minus=SIGNS_R4,
                ),
            ),
        },
    ),
)
FORMATS = make_block_formats(TYPES)
