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
eight indices, and bits 8 to 31 are the highest three of each. The places of all bits are below, in the notation of
shared/ggml_fields.py. Each operation rounds to float32.

Reference: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp QuantizerIQKT::set_values,
dequantize_row_iq1_kt … iq4_kt.
"""

from functools import cache, partial

from quanterr.formats.shared.ggml_blocks import IQ4, BlockType, make_block_formats
from quanterr.formats.shared.ggml_fields import IN_HEAD, Block, Field, Layout, Numbers
from quanterr.lazy_torch import Tensor, torch

FACTOR, FIRST = 0xCBAC1FED, 4096


@cache
def generate_levels(n_levels: int, bits: int, magnitudes: bool = False) -> Tensor:
    """Return the levels of each index of ``bits`` bits, int8 (indices, ``n_levels``)."""
    state, levels = torch.arange(1 << bits) + FIRST, []
    for _ in range(n_levels):
        state = state * FACTOR & 0xFFFFFFFF
        levels.append((state & 63) + (state >> 8 & 63) + (state >> 16 & 63) + (state >> 24 & 63) - 126)
    stacked = torch.stack(levels, 1)
    return (stacked.abs() if magnitudes else stacked).to(torch.int8)


WORDS = (Field(4, "76543", 16, word=16),)
HALF_BYTES = (Field(0, "65:7", 4),)
TYPES = (
    BlockType(
        "13 bits for 8 from a generator, a scale for 32 and the row",
        (6, 8),
        {
            "IQ1_KT": Block(
                Numbers(32, scale_levels=IQ4, width=8, grid=partial(generate_levels, 8, 13)),
                Layout(
                    (Field(8, "76543"), Field(40, "6543:7", 4, 8), Field(0, "765:43", 1, 12, first=4)),
                    (Field(0, "765", mask=15),),
                    d=IN_HEAD,
                ),
            )
        },
    ),
    BlockType(
        "16 bits for 8 from a generator, a scale for 32 and the row",
        (9, 11),
        {
            "IQ2_KT": Block(
                Numbers(32, scale_levels=IQ4, width=8, grid=partial(generate_levels, 8, 16)),
                Layout(WORDS, HALF_BYTES, d=IN_HEAD),
            )
        },
    ),
    BlockType(
        "16 bits for 8 from a generator, signs, a scale for 32 and the row",
        (15, 17),
        {
            "IQ3_KT": Block(
                Numbers(32, width=8, grid=partial(generate_levels, 8, 16, magnitudes=True)),
                Layout(
                    WORDS,
                    HALF_BYTES,
                    minus=tuple(Field(68, "43:765", 1, up, word=64, first=8 * up) for up in range(8)),
                    d=IN_HEAD,
                ),
            )
        },
    ),
    BlockType(
        "15 bits for 4 from a generator, a scale for 32 and the row",
        (20, 22),
        {
            "IQ4_KT": Block(
                Numbers(32, offset=-64, width=4, grid=partial(generate_levels, 4, 16)),
                Layout(
                    (
                        Field(32, "765432"),
                        Field(96, "65432:7", 4, 8),
                        Field(0, "765:432", 3, 12, word=32, first=8),
                        Field(0, "765", 1, 15, word=32),
                    ),
                    (Field(0, "765", 7, word=32, first=1),),
                    d=IN_HEAD,
                ),
            )
        },
    ),
)
FORMATS = make_block_formats(TYPES)
