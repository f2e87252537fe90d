"""GGUF: 4-bit codes that index a table: IQ4_NL, IQ4_XS, MXFP4 and NVFP4.

    bytes   IQ4_NL    d f16, codes 16                                blocks of 32 elements
            IQ4_XS    d f16, upper 2, lower 4, codes 128             256
            MXFP4     exponent 1, codes 16                           32
            NVFP4     scales 4, codes 32                             64

    IQ4_NL            element = table[code] * d
    IQ4_XS            element = table[code] * (d * (scale - 32)), a scale of 6 bits for 32 elements
    MXFP4             element = table[code] * 2^(exponent - 128)
    NVFP4             element = table[code] * scale / 2, a scale for 16 elements
    NVFP4 if X.weight has a tensor X.scale (f32, one, or one per expert): the same times X.scale
                      (some converters call it X.weight.scale, which llama.cpp does not look for)

The tables are IQ4 and E2M1 below; E2M1 holds doubled E2M1 values. Byte j of the codes of 32 elements holds the code of
element j in its lower half and of element 16 + j in its upper half (NVFP4: of 16 elements, j and 8 + j). IQ4_XS: the
lower four bits of the scales are the halves of 4 bytes, the upper two bits are fields of the u16, the lowest first.
NVFP4: the scale is an E4M3 number whose sign is ignored; 0x7F is 0. An MXFP4 exponent of 255 is an ordinary number:
ggml knows no NaN there.

Computed in float32: table[code] * scale is exact, multiplying by X.scale rounds once.

The types …_R4 and …_R8 of ik_llama.cpp interleave 4 or 8 rows: shared/ggml_interleaved.py and MXFP4_R8 below.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_iq4_nl, iq4_xs, mxfp4, nvfp4;
ggml/src/ggml-impl.h ggml_e8m0_to_fp32_half, ggml_ue4m3_to_fp32; X.scale: src/llama-graph.cpp build_lora_mm.
"""

from functools import cache, partial

import torch
from msgspec.structs import replace
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    Chunk,
    Decoder,
    ElementType,
    Format,
    FormatMismatch,
    Native,
    Parts,
    PartSpec,
    Values,
    Weight,
    Workspace,
)
from quanterr.formats.shared.ggml_blocks import (
    IQ4,
    BlockType,
    StoredRows,
    block_formats,
    code_buffer,
    dequantize,
    fit,
    look_up,
    pack_integers,
    read_half,
    split_nibbles,
)
from quanterr.formats.shared.ggml_fields import Field, Layout, Numbers, write_levels
from quanterr.formats.shared.ggml_interleaved import INTERLEAVED
from quanterr.kernel import levels

IQ4_LEVELS = levels.nibbles(IQ4)
MXFP4_R8 = Layout((Field(8, "32kkk10:4", 4),))
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def iq4_nl(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ4_NL blocks: 18 bytes to 32 elements."""
    out.copy_(_look_up_entries(raw, 2, 32, IQ4, workspace)).mul_(read_half(raw, 0))


def iq4_xs(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ4_XS blocks: 136 bytes to 256 elements."""
    upper, lower = raw[:, 2:4], raw[:, 4:8]
    low = torch.stack([lower & 15, lower >> 4], 2).flatten(1)
    high = torch.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    scales = read_half(raw, 0).mul((low | high << 4).view(torch.int8) - 32)
    out.copy_(_look_up_entries(raw, 8, 32, IQ4, workspace))
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2))


def mxfp4(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize MXFP4 blocks: 17 bytes to 32 elements."""
    scales = look_up(_make_halved_powers(raw.device), raw[:, :1], "scales", workspace)
    out.copy_(_look_up_entries(raw, 1, 32, E2M1, workspace)).mul_(scales)


def mxfp4_r8(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize MXFP4_R8 blocks of eight rows: 136 bytes to 8 · 32 elements."""
    write_levels(Numbers(E2M1, 32), MXFP4_R8, raw, out, workspace)
    out.mul_(_make_halved_powers(raw.device)[raw[:, :, :8].int()].transpose(1, 2).unsqueeze(3))


def nvfp4(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize NVFP4 blocks: 36 bytes to 64 elements."""
    scales = look_up(_make_halved_e4m3(raw.device), raw[:, :4], "scales", workspace)
    out.copy_(_look_up_entries(raw, 4, 16, E2M1, workspace))
    out.view(-1, 4, 16).mul_(scales.unsqueeze(2))


def _look_up_entries(raw: Tensor, at: int, run: int, table: tuple[int, ...], workspace: Workspace) -> Tensor:
    """Look up all codes from byte ``at`` on, int8 (n, elements); ``run`` elements share ``run`` / 2 bytes."""
    n = len(raw)
    codes = code_buffer(workspace, n, 2 * (raw.shape[1] - at) // run, 2, run // 2)
    low, high = split_nibbles(raw, at, raw.shape[1], workspace)
    codes[:, :, 0], codes[:, :, 1] = low.view(codes[:, :, 0].shape), high.view(codes[:, :, 0].shape)
    pairs = codes.view(n, -1).view(torch.int16)
    return look_up(_make_pairs(table, raw.device), pairs, "entries", workspace).view(torch.int8)


@cache
def _make_pairs(table: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the table entries of two codes in two bytes, by the number that both bytes form: int16 (15 · 257 + 1,)."""
    entries = torch.tensor(table, dtype=torch.int8)
    number = torch.arange(15 * 257 + 1)
    return pack_integers(torch.stack([entries[number & 15], entries[number >> 8 & 15]], 1)).to(device)


@cache
def _make_halved_powers(device: torch.device) -> Tensor:
    """Return 2^(exponent - 128) for each exponent, float32 (256,)."""
    return torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 128).float().to(device)


@cache
def _make_halved_e4m3(device: torch.device) -> Tensor:
    """Return half of each code's E4M3 number, float32 (256,); the sign is ignored and NaN becomes 0."""
    code = torch.arange(256) & 0x7F
    fraction, exponent = (code & 7).double(), code >> 3
    numbers = torch.ldexp(torch.where(exponent > 0, 8 + fraction, fraction), exponent.clamp(min=1) - 11)
    numbers[0x7F] = 0
    return numbers.float().to(device)


def fit_nvfp4(parts: Parts) -> Weight:
    """Return a weight of any shape, with no scale, one scale for the tensor, or one per expert."""
    weight, scale = fit(NVFP4, parts), parts.get("scale")
    if scale is None:
        return weight
    shape = parts.codes.shape
    if scale.n != 1 and not (len(shape) == 3 and scale.n == shape[0]):
        raise FormatMismatch(f"scale {scale} should be one number or one per expert of a weight of shape {list(shape)}")
    decoder = Decoder(parts.codes, parts.matrix[1], ElementType.NVFP4, scale=partial(read_scales, parts, scale))
    foreign = scale.name.endswith(".weight.scale")
    warning = "its scale is called X.weight.scale: llama.cpp looks for X.scale, and refuses or ignores this one"
    scaled = Native(partial(dequantize_scaled, parts, scale), decoder)
    return replace(weight, dequantize=scaled, warnings=(*weight.warnings, *([warning] if foreign else ())))


def dequantize_scaled(parts: Parts, scale: Entry, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the blocks' elements times the scale of the tensor or expert, (r, c)."""
    values = dequantize(parts, nvfp4, chunk, workspace).weight
    return Values(values.mul_(read_scales(parts, scale, chunk, workspace)))


def read_scales(parts: Parts, scale: Entry, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the scale of each row of a chunk, (r, 1)."""
    scales = workspace.read_whole("scale", scale).view(-1)
    rows_of_each = max(parts.matrix[0] // len(scales), 1)
    of_row = torch.arange(chunk.row, chunk.stop_row, device=scales.device) // rows_of_each
    return scales[of_row].unsqueeze(1)


NVFP4 = BlockType(
    "NVFP4", "E2M1 codes, an E4M3 scale for 16", nvfp4, 16, 4, (19, 21), (4, 36), levels.E2M1, least_scale=0.0
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
    *block_formats(
        (
            BlockType(
                "MXFP4",
                "E2M1 codes, a power of two for 32",
                mxfp4,
                32,
                4,
                (18, 20),
                (1, 17),
                levels.E2M1,
                least_scale=0.0,
                rows={"MXFP4_R8": StoredRows(mxfp4_r8, MXFP4_R8.span)},
            ),
            BlockType(
                "IQ4_NL",
                "4-bit codes for a table, a scale for 32",
                iq4_nl,
                32,
                4,
                (21, 23),
                (2, 18),
                IQ4_LEVELS,
                rows=INTERLEAVED["IQ4_NL"],
            ),
            BlockType(
                "IQ4_XS",
                "4-bit codes for a table, a 6-bit scale for 32",
                iq4_xs,
                32,
                4,
                (21, 23),
                (8, 136),
                IQ4_LEVELS,
                scale_steps=levels.ScaleSteps(8, 31),
                rows=INTERLEAVED["IQ4_XS"],
            ),
        ),
    ),
)
