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

The types …_R4 of ik_llama.cpp interleave 4 rows. The places of all bits are below, in the notation of
shared/ggml_fields.py.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_q2_K … q6_K, get_scale_min_k4;
ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp repack_q2_k … q6_k.
"""

from quanterr.formats.shared.ggml_blocks import BlockType, make_block_formats
from quanterr.formats.shared.ggml_fields import Block, Field, Layout, Numbers

Q2_K = Numbers(16, tuple(range(4)))
Q3_K = Numbers(16, tuple(range(-4, 4)), offset=-32)
Q4_K, Q5_K = Numbers(32, tuple(range(16))), Numbers(32, tuple(range(32)))
Q6_K = Numbers(16, tuple(range(-32, 32)), signed=True)

PAIRS = Layout(  # the scales of Q4_K and Q5_K
    (),
    (Field(4, "7L65", 4), Field(4, "65:7", 2, 4, first=4)),
    minima=(Field(8, "765:7", 4), Field(8, "65:7", 2, 4, first=4)),
    d_minima=2,
)
PAIRS_R4 = Layout(
    (),
    (Field(32, "765kk", 4), Field(16, "65kk:7L", 2, 4)),
    minima=(Field(32, "765kk", 4, first=4), Field(16, "65kk:7L", 2, 4, first=2)),
    d_minima=8,
)
TYPES = (
    BlockType(
        "2-bit codes, a scale and a minimum for 16",
        (10, 12),
        {
            "Q2_K": Block(
                Q2_K,
                Layout(
                    (Field(16, "743210:65", 2),),
                    (Field(0, "7654", 4),),
                    minima=(Field(0, "7654", 4, first=4),),
                    d=80,
                    d_minima=82,
                ),
            ),
            "Q2_K_R4": Block(
                Q2_K,
                Layout(
                    (Field(80, "7654kk10:32", 2),),
                    (Field(16, "7654kk", 4),),
                    minima=(Field(16, "7654kk", 4, first=4),),
                    d_minima=8,
                ),
            ),
        },
    ),
    BlockType(
        "3-bit codes, a scale for 16",
        (15, 18),
        {
            "Q3_K": Block(
                Q3_K,
                Layout(
                    (Field(32, "743210:65", 2), Field(0, "43210:765", 1, 2)),
                    (Field(96, "654:7", 4), Field(104, "54:76", 2, 4)),
                    d=108,
                ),
            ),
            "Q3_K_R4": Block(
                Q3_K,
                Layout(
                    (Field(184, "7654kk10:32", 2), Field(56, "765kk10:432", 1, 2)),
                    (Field(24, "654kk:7", 4), Field(8, "54kk:76", 2, 4)),
                ),
            ),
        },
    ),
    BlockType(
        "4-bit codes, a scale and a minimum for 32",
        (22, 24),
        {
            "Q4_K": Block(Q4_K, PAIRS._replace(codes=(Field(16, "7643210:5", 4),))),
            "Q4_K_R4": Block(Q4_K, PAIRS_R4._replace(codes=(Field(64, "76524kk10:3", 4),))),
        },
    ),
    BlockType(
        "5-bit codes, a scale and a minimum for 32",
        (28, 30),
        {
            "Q5_K": Block(Q5_K, PAIRS._replace(codes=(Field(48, "7643210:5", 4), Field(16, "43210:765", 1, 4)))),
            "Q5_K_R4": Block(
                Q5_K, PAIRS_R4._replace(codes=(Field(192, "76524kk10:3", 4), Field(64, "765kk10:423", 1, 4)))
            ),
        },
    ),
    BlockType(
        "6-bit codes, a scale for 16",
        (34, 36),
        {
            "Q6_K": Block(
                Q6_K,
                Layout((Field(0, "7543210:6", 4), Field(128, "743210:65", 2, 4)), (Field(192, "7654"),), d=208),
            ),
            "Q6_K_R4": Block(
                Q6_K,
                Layout((Field(328, "76524kk10:3", 4), Field(72, "7654kk10:23", 2, 4)), (Field(8, "7654kk"),)),
            ),
        },
    ),
)
FORMATS = make_block_formats(TYPES)
