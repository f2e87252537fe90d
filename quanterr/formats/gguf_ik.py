"""GGUF: the IQ_K types of ik_llama.cpp, blocks of 256 elements with codes for a table that each part can shift.

    bytes   IQ2_K   d f16, shifted 2, scales 8, codes 64
            IQ3_K   d f16, shifted 2, signs 2, scales 8, codes 64, third 32
            IQ4_K   d f16, shifted 2, upper scales 4, scales 8, codes 128
            IQ5_K   d f16, shifted 2, upper scales 4, scales 8, codes 128, fifth 32
            IQ6_K   d f16, shifted 2, scales 16 i8, codes 128, upper 64

    element = (d * scale) * (level + shift if shifted)          16 elements share a scale and a bit of shifted

The levels are IQ2 to IQ6 below. IQ6: (((code * 0.0011972 - 0.11218) * code + 6.2568) * code - 127, each operation
rounded to float32; GPU kernels, and those for whole matrices, round that to an integer.
The places of all bits: LAYOUTS below, in the notation of shared/ggml_fields.py.

Reference: ikawrakow/ik_llama.cpp (8337e4cd) ggml/src/iqk/iqk_quantize.cpp dequantize_row_iq2_k … iq6_k.
"""

from functools import partial

import torch

from quanterr.formats.shared.ggml_blocks import BlockType, StoredRows, block_formats
from quanterr.formats.shared.ggml_fields import Field, Layout, Numbers, decode
from quanterr.kernel.levels import Levels, ScaleSteps

IQ2 = (-31, -13, 1, 17)
IQ3 = (-63, -40, -23, -10, 1, 13, 28, 47)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ5 = (
    -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
    -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121,
)  # fmt: skip


def _make_iq6() -> tuple[float, ...]:
    """Return the levels of 6-bit codes: a polynomial in float32."""
    code = torch.arange(64, dtype=torch.float32)
    cubic = code * torch.tensor(0.0011972) - torch.tensor(0.11218)
    return tuple(((cubic * code + torch.tensor(6.2568)) * code - 127.0).tolist())


IQ6 = _make_iq6()

NUMBERS = {
    "IQ2_K": Numbers(IQ2, 16, offset=-8, shift=5),
    "IQ3_K": Numbers(IQ3, 16, 2, 1, shift=4),
    "IQ4_K": Numbers(IQ4, 16, offset=-32, shift=4),
    "IQ5_K": Numbers(IQ5, 16, offset=-32, shift=2),
    "IQ6_K": Numbers(IQ6, 16, shift=1, signed=True),
}
FLAGS = (Field(2, "7:654", 1),)
SCALES = Field(8, "765:4", 4), Field(4, "76:54", 2, 4)
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
}


def _make_type(name: str, summary: str, bits: int, usual_db: tuple[int, int], most: int) -> BlockType:
    """Return the type; its largest scale is ``most`` steps between scales."""
    numbers = NUMBERS[name]
    layouts = {dtype: layout for dtype, layout in LAYOUTS.items() if dtype.startswith(name)}
    rows = {dtype: StoredRows(partial(decode, numbers, layout), layout.span) for dtype, layout in layouts.items()}
    table = tuple(map(float, numbers.levels))
    levels = Levels(0x00, 0xFF, table[0], table[-1], table)
    steps = ScaleSteps(16, most)
    return BlockType(name, summary, None, numbers.part, bits, usual_db, levels=levels, scale_steps=steps, rows=rows)


FORMATS = block_formats(
    (
        _make_type("IQ2_K", "2-bit codes for a table, a scale for 16", 2, (10, 12), 7),
        _make_type("IQ3_K", "3-bit codes for a table, a scale for 16", 3, (17, 19), 15),
        _make_type("IQ4_K", "4-bit codes for a table, a 6-bit scale for 16", 4, (23, 25), 31),
        _make_type("IQ5_K", "5-bit codes for a table, a 6-bit scale for 16", 5, (29, 31), 31),
        _make_type("IQ6_K", "6-bit codes for a table, an 8-bit scale for 16", 6, (35, 37), 127),
    )
)
