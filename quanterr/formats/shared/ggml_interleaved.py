"""Types of ik_llama.cpp that interleave rows of llama.cpp's types: the same numbers in another order.

Reference: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp repack_…, dequantize_row_…_r4, …_r8.
"""

from collections.abc import Mapping

from quanterr.formats.shared.ggml_blocks import IQ4, StoredRows
from quanterr.formats.shared.ggml_fields import Field, Layout, Numbers, store_rows

SIX_BITS = Field(24, "654kk:7", 4), Field(8, "54kk:76", 2, 4)
PAIRS = (Field(32, "765kk:L", 4), Field(16, "65kk:7L", 2, 4)), (Field(32, "765kk:H", 4), Field(16, "65kk:7H", 2, 4))
ROWS = {  # type → its numbers, and the layouts of the types that interleave its rows
    "Q4_0": (Numbers(tuple(range(-8, 8)), 32), {"Q4_0_R8": Layout((Field(16, "32kkk10:4", 4),))}),
    "Q5_0": (
        Numbers(tuple(range(-16, 16)), 32),
        {"Q5_0_R4": Layout((Field(24, "24kk10:3", 4), Field(8, "kk10:324", 1, 4)))},
    ),
    "Q8_0": (Numbers((), 32), {"Q8_0_R8": Layout((Field(16, "432kkk10"),))}),
    "Q2_K": (
        Numbers(tuple(range(4)), 16),
        {
            "Q2_K_R4": Layout(
                (Field(80, "7654kk10:32", 2),),
                (Field(16, "7654kk:L", 4),),
                minima=(Field(16, "7654kk:H", 4),),
                d_minima=8,
            )
        },
    ),
    "Q3_K": (
        Numbers(tuple(range(-4, 4)), 16, offset=-32),
        {"Q3_K_R4": Layout((Field(184, "7654kk10:32", 2), Field(56, "765kk10:432", 1, 2)), SIX_BITS)},
    ),
    "Q4_K": (
        Numbers(tuple(range(16)), 32),
        {"Q4_K_R4": Layout((Field(64, "76524kk10:3", 4),), PAIRS[0], minima=PAIRS[1], d_minima=8)},
    ),
    "Q5_K": (
        Numbers(tuple(range(32)), 32),
        {
            "Q5_K_R4": Layout(
                (Field(192, "76524kk10:3", 4), Field(64, "765kk10:423", 1, 4)), PAIRS[0], minima=PAIRS[1], d_minima=8
            )
        },
    ),
    "Q6_K": (
        Numbers(tuple(range(-32, 32)), 16, signed=True),
        {"Q6_K_R4": Layout((Field(328, "76524kk10:3", 4), Field(72, "7654kk10:23", 2, 4)), (Field(8, "7654kk"),))},
    ),
    "IQ4_NL": (Numbers(IQ4, 32), {"IQ4_NL_R4": Layout((Field(8, "24kk10:3", 4),))}),
    "IQ4_XS": (
        Numbers(IQ4, 32, offset=-32),
        {"IQ4_XS_R8": Layout((Field(64, "76543kkk10:2", 4),), (Field(32, "65kkk:7", 4), Field(16, "5kkk:76", 2, 4)))},
    ),
}
INTERLEAVED: Mapping[str, Mapping[str, StoredRows]] = {name: store_rows(*rows) for name, rows in ROWS.items()}
