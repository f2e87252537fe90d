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

The types …_R4 and …_R8 of ik_llama.cpp interleave 4 or 8 rows. The places of all bits are below, in the notation of
shared/ggml_fields.py.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_q4_0 … q8_0;
ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp repack_q4_0 … q8_0.
"""

from quanterr.formats.shared.ggml_blocks import BlockType, make_block_formats
from quanterr.formats.shared.ggml_fields import Block, Field, Layout, Numbers

Q4_0, Q4_1 = Numbers(32, tuple(range(-8, 8))), Numbers(32, tuple(range(16)))
Q5_0, Q5_1 = Numbers(32, tuple(range(-16, 16))), Numbers(32, tuple(range(32)))
Q8_0 = Numbers(32)


TYPES = (
    BlockType(
        "4-bit codes, a scale for 32",
        (20, 23),
        {
            "Q4_0": Block(Q4_0, Layout((Field(2, "3210:4", 4),))),
            "Q4_0_R8": Block(Q4_0, Layout((Field(16, "32kkk10:4", 4),))),
        },
    ),
    BlockType(
        "4-bit codes, a scale and a minimum for 32",
        (21, 24),
        {"Q4_1": Block(Q4_1, Layout((Field(4, "3210:4", 4),), d_minima=2))},
    ),
    BlockType(
        "5-bit codes, a scale for 32",
        (26, 29),
        {
            "Q5_0": Block(Q5_0, Layout((Field(6, "3210:4", 4), Field(2, "43:210", 1, 4)))),
            "Q5_0_R4": Block(Q5_0, Layout((Field(24, "24kk10:3", 4), Field(8, "kk10:324", 1, 4)))),
        },
    ),
    BlockType(
        "5-bit codes, a scale and a minimum for 32",
        (28, 30),
        {"Q5_1": Block(Q5_1, Layout((Field(8, "3210:4", 4), Field(4, "43:210", 1, 4)), d_minima=2))},
    ),
    BlockType(
        "8-bit codes, a scale for 32",
        (44, 46),
        {
            "Q8_0": Block(Q8_0, Layout((Field(2, "43210"),))),
            "Q8_0_R8": Block(Q8_0, Layout((Field(16, "432kkk10"),))),
        },
    ),
)
FORMATS = make_block_formats(TYPES)
