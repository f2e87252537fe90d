"""GGUF: 4-bit codes that index a table: IQ4_NL, IQ4_XS, MXFP4, NVFP4 and ROCmFP4.

    bytes   IQ4_NL    d f16, codes 16                                blocks of 32 elements
            IQ4_XS    d f16, upper 2, lower 4, codes 128             256
            MXFP4     exponent 1, codes 16                           32
            NVFP4     scales 4, codes 32                             64
            Q4_0_ROCMFP4         codes 16, scales 2                  32
            Q4_0_ROCMFP4_FAST    codes 16, scale 1                   32

    IQ4_NL            element = table[code] * d
    IQ4_XS            element = table[code] * (d * (scale - 32)), a scale of 6 bits for 32 elements
    MXFP4             element = table[code] * 2^(exponent - 128)
    NVFP4             element = table[code] * scale / 2, a scale for 16 elements
    NVFP4 if X.weight has a tensor X.scale (f32, one, or one per expert): the same times X.scale
                      (some converters call it X.weight.scale, which llama.cpp does not look for)
    Q4_0_ROCMFP4      element = table[code] * scale / 2, a scale for 16 elements; _FAST: for 32

The tables are IQ4, E2M1 and ROCM below; E2M1 holds doubled E2M1 values. Byte j of the codes of 32 elements holds the
code of element j in its lower half and of element 16 + j in its upper half (NVFP4: of 16 elements, j and 8 + j).
IQ4_XS: the lower four bits of the scales are halves of 4 bytes, the upper two bits fields of the u16, the lowest first.
NVFP4 and ROCmFP4: the scale is an E4M3 number whose sign is ignored; 0x7F is 0, and so is ROCmFP4's 0xFF. An MXFP4
exponent of 255 is an ordinary number: ggml knows no NaN there.

Computed in float32: table[code] * scale is exact, multiplying by X.scale rounds once.

The types …_R4 and …_R8 of ik_llama.cpp interleave 4 or 8 rows. The places of all bits are below, in the notation of
shared/ggml_fields.py.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_iq4_nl, iq4_xs, mxfp4, nvfp4;
ggml/src/ggml-impl.h ggml_e8m0_to_fp32_half, ggml_ue4m3_to_fp32; X.scale: src/llama-graph.cpp build_lora_mm;
ciru-ai/ROCmFPX@ca7cfcca ggml/rocmfp4/rocmfp4.c rocmfp4_dequantize_row_q4_0, its docs/ROCmFP4-SPEC.md v1.2.
"""

from math import ldexp

from msgspec.structs import replace

from quanterr.checkpoints.ggml_types import OF_NAME
from quanterr.formats.base import Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.ggml_blocks import IQ4, BlockType, fit, make_block_formats, make_decoder
from quanterr.formats.shared.ggml_fields import Block, Field, Layout, Numbers
from quanterr.kernel import levels
from quanterr.kernel.grid import Grid
from quanterr.kernel.interpreter import Native

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
ROCM = (0, 1, 2, 3, 4, 6, 8, 10, 0, -1, -2, -3, -4, -6, -8, -10)
HALVED_POWERS = tuple(ldexp(1.0, exponent - 128) for exponent in range(256))


def _halve_e4m3(code: int) -> float:
    """Return half of the number of an E4M3 code; the sign is ignored, and 0x7F is 0."""
    fraction, exponent = code & 7, code >> 3 & 15
    if code == 0x7F:
        return 0.0
    return ldexp(fraction + 8 * (exponent > 0), max(exponent, 1) - 11)


IQ4_NL, IQ4_XS = Numbers(32, IQ4), Numbers(32, IQ4, offset=-32)
MXFP4 = Numbers(32, E2M1, scale_levels=HALVED_POWERS)
ROCM_SCALES = tuple(0.0 if code == 0xFF else _halve_e4m3(code) for code in range(256))
NVFP4 = BlockType(
    "E2M1 codes, an E4M3 scale for 16",
    (19, 21),
    {
        "NVFP4": Block(
            Numbers(16, E2M1, scale_levels=tuple(map(_halve_e4m3, range(256)))),
            Layout((Field(4, "54210:3", 4),), (Field(0, "54"),), d=None),
        )
    },
    levels.E2M1,
    min_scale=0.0,
)


def fit_nvfp4(parts: Parts) -> Weight:
    """Return a weight of any shape, with no scale, one scale for the tensor, or one per expert."""
    weight, scale = fit(NVFP4, parts), parts.get("scale")
    if scale is None:
        return weight
    shape = parts.codes.shape
    if scale.n != 1 and not (len(shape) == 3 and scale.n == shape[0]):
        raise FormatMismatch(f"scale {scale} should be one number or one per expert of a weight of shape {list(shape)}")
    decoder = make_decoder(parts, NVFP4.blocks["NVFP4"], OF_NAME["NVFP4"])
    decoder.scale = Grid(scale, height=max(parts.matrix[0] // scale.n, 1))
    foreign = scale.name.endswith(".weight.scale")
    warning = "its scale is called X.weight.scale: llama.cpp looks for X.scale, and refuses or ignores this one"
    return replace(weight, dequantize=Native(decoder), warnings=(*weight.warnings, *([warning] if foreign else ())))


TYPES = (
    BlockType(
        "E2M1 codes, a power of two for 32",
        (18, 20),
        {
            "MXFP4": Block(MXFP4, Layout((Field(1, "3210:4", 4),), (Field(0, ""),), d=None)),
            "MXFP4_R8": Block(MXFP4, Layout((Field(8, "32kkk10:4", 4),), (Field(0, "kkk"),), d=None)),
        },
        levels.E2M1,
        min_scale=0.0,
    ),
    BlockType(
        "4-bit codes for a table, a scale for 32",
        (21, 23),
        {
            "IQ4_NL": Block(IQ4_NL, Layout((Field(2, "3210:4", 4),))),
            "IQ4_NL_R4": Block(IQ4_NL, Layout((Field(8, "24kk10:3", 4),))),
        },
    ),
    BlockType(
        "4-bit codes for a table, a 6-bit scale for 32",
        (21, 23),
        {
            "IQ4_XS": Block(
                IQ4_XS,
                Layout((Field(8, "7653210:4", 4),), (Field(4, "76:5", 4), Field(2, "7:65", 2, 4))),
            ),
            "IQ4_XS_R8": Block(
                IQ4_XS,
                Layout((Field(64, "76543kkk10:2", 4),), (Field(32, "65kkk:7", 4), Field(16, "5kkk:76", 2, 4))),
            ),
        },
    ),
    *(
        BlockType(
            f"4-bit codes for a table, an E4M3 scale for {part} (ROCmFPX)",
            (18, 21),
            {
                name: Block(
                    Numbers(part, ROCM, scale_levels=ROCM_SCALES),
                    Layout((Field(0, "3210:4", 4),), (Field(16, of_scale),), d=None),
                )
            },
            levels.nibbles(ROCM),
            min_scale=0.0,
        )
        for name, part, of_scale in (("Q4_0_ROCMFP4", 16, "4"), ("Q4_0_ROCMFP4_FAST", 32, ""))
    ),
)
FORMATS = (
    Format(
        NVFP4.format,
        {
            "codes": PartSpec(("{weight}",), frozenset({"NVFP4"})),
            "scale": PartSpec(("{module}.scale", "{weight}.scale"), frozenset({"F32"}), optional=True),
        },
        fit_nvfp4,
        summary=f"{NVFP4.summary}; one more for the tensor or for each expert",
        usual_db=NVFP4.usual_db,
    ),
    *make_block_formats(TYPES),
)
