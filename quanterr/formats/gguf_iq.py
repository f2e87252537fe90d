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

Types …_R4 of ik_llama.cpp interleave four rows, as GRIDS_R4 states in the notation of shared/ggml_fields.py.
IQ2_XXS_R4 and IQ3_XXS_R4: the lowest bits of four bytes are the scale, and the rest b of each, b ^ b >> 1, are eight
signs. IQ2_XS_R4: the signs are s ^ s << 1 for the upper 7 bits s of a word. IQ1_S_R4 and IQ1_M_R4 have d, float16, in
front of the blocks of each row, and blocks of 32 elements; the element of IQ1_M_R4 is d * scale * (level + delta), with
scales of 4 bits.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c dequantize_row_iq1_s … iq3_s; the grids:
shared/ggml_grids.py. Interleaved: ikawrakow/ik_llama.cpp@8337e4cd ggml/src/iqk/iqk_quantize.cpp
dequantize_row_iq1_s_r4 … iq3_s_r4.
"""

import base64
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quanterr.formats.base import Workspace
from quanterr.formats.shared.ggml_blocks import (
    BlockType,
    StoredRows,
    block_formats,
    expand_bits,
    look_up,
    pack_integers,
    read_half,
)
from quanterr.formats.shared.ggml_fields import Field, gather, read_halves
from quanterr.formats.shared.ggml_grids import GRIDS

TERNARY = (-1, 0, 1)
IQ2 = (8, 25, 43)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)


def iq1_s(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ1_S blocks: 50 bytes to 256 elements."""
    words = _read_integers(raw, 34, 50, torch.int16, workspace)  # (n, 8)
    index = workspace.buffer("index", (len(raw), 8, 4), torch.int32)
    for k in range(4):
        index[:, :, k] = words >> 3 * k & 7
    index.bitwise_or_((words >> 12 & 8).unsqueeze(2)).mul_(256).bitwise_or_(raw[:, 2:34].view(-1, 8, 4))
    scales = read_half(raw, 0).mul((words >> 12 & 7) * 2 + 1).mul_(0.125)
    _look_up_eighths(index, out, workspace).view(-1, 8, 32).mul_(scales.unsqueeze(2))


def iq1_m(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ1_M blocks: 56 bytes to 256 elements."""
    words = _read_integers(raw, 48, 56, torch.int16, workspace)  # (n, 4)
    parts = words >> 12 & 15
    d = (parts[:, :1] | parts[:, 1:2] << 4 | parts[:, 2:3] << 8 | parts[:, 3:] << 12).to(torch.int16)
    scales = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], 2).flatten(1)
    scales = d.view(torch.float16).float().mul(scales * 2 + 1).mul_(0.125)
    index = workspace.buffer("index", (len(raw), 16, 2), torch.int32)
    upper = raw[:, 32:48]
    index[:, :, 0], index[:, :, 1] = upper & 15, upper >> 4
    index.mul_(256).bitwise_or_(raw[:, :32].view(-1, 16, 2))
    _look_up_eighths(index, out, workspace).view(-1, 16, 16).mul_(scales.unsqueeze(2))


def iq2_xxs(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ2_XXS blocks: 66 bytes to 256 elements."""
    words = _read_integers(raw, 2, 66, torch.int32, workspace).view(-1, 8, 2)
    levels = look_up(_make_grid("IQ2_XXS", IQ2, raw.device), raw[:, 2:].view(-1, 8, 8)[:, :, :4], "levels", workspace)
    _apply_signs(levels, _look_up_signs(words[:, :, 1], workspace), out)
    scales = read_half(raw, 0).mul((words[:, :, 1] >> 28 & 15) + 0.5).mul_(0.25)
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2))


def iq2_xs(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ2_XS blocks: 74 bytes to 256 elements."""
    words = _read_integers(raw, 2, 66, torch.int16, workspace)  # (n, 32)
    levels = look_up(_make_grid("IQ2_XS", IQ2, raw.device), words & 511, "levels", workspace)
    signs = look_up(_make_parity_signs(raw.device), words >> 9 & 127, "signs", workspace)
    _apply_signs(levels, signs, out)
    out.view(-1, 16, 16).mul_(_read_scales(raw, 66).unsqueeze(2))


def iq2_s(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ2_S blocks: 82 bytes to 256 elements."""
    index = workspace.buffer("index", (len(raw), 8, 4), torch.int32)
    for k in range(4):
        index[:, :, k] = raw[:, 66:74] >> 2 * k & 3
    index.mul_(256).bitwise_or_(raw[:, 2:34].view(-1, 8, 4))
    levels = look_up(_make_grid("IQ2_S", IQ2, raw.device), index, "levels", workspace)
    _apply_signs(levels, look_up(expand_bits(1, -1, raw.device), raw[:, 34:66], "signs", workspace), out)
    out.view(-1, 16, 16).mul_(_read_scales(raw, 74).unsqueeze(2))


def iq3_xxs(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ3_XXS blocks: 98 bytes to 256 elements."""
    words = _read_integers(raw, 66, 98, torch.int32, workspace)  # (n, 8)
    levels = look_up(_make_grid("IQ3_XXS", IQ3_XXS, raw.device), raw[:, 2:66], "levels", workspace)
    _apply_signs(levels, _look_up_signs(words, workspace), out)
    scales = read_half(raw, 0).mul((words >> 28 & 15) + 0.5).mul_(0.5)
    out.view(-1, 8, 32).mul_(scales.unsqueeze(2))


def iq3_s(raw: Tensor, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ3_S blocks: 110 bytes to 256 elements."""
    index = workspace.buffer("index", (len(raw), 8, 8), torch.int32)
    for k in range(8):
        index[:, :, k] = raw[:, 66:74] >> k & 1
    index.mul_(256).bitwise_or_(raw[:, 2:66].view(-1, 8, 8))
    levels = look_up(_make_grid("IQ3_S", IQ3_S, raw.device), index, "levels", workspace)
    _apply_signs(levels, look_up(expand_bits(1, -1, raw.device), raw[:, 74:106], "signs", workspace), out)
    scales = torch.stack([raw[:, 106:] & 15, raw[:, 106:] >> 4], 2).flatten(1)
    out.view(-1, 8, 32).mul_(read_half(raw, 0).mul(scales * 2 + 1).unsqueeze(2))


class GridLayout(NamedTuple):
    """The places where an interleaved type stores indices, signs and scales."""

    lower: Field
    upper: Field | None
    signs: Field
    scales: tuple[Field, ...]
    part: int  # elements that share a scale


SCALE_BITS = tuple(Field(8, f"765kk{place}:LLL", 1, up) for up, place in enumerate(("LL", "LH", "HL", "HH")))
GRIDS_R4 = {
    "IQ2_XXS": GridLayout(Field(136, "765kk43"), None, Field(8, "765kk43:210", 1), SCALE_BITS, 32),
    "IQ2_XS": GridLayout(
        Field(8, "765kk43L"), Field(8, "765kk43H", mask=1), Field(8, "765kk43H:210", 1), (Field(264, "765kk:4", 4),), 16
    ),
    "IQ2_S": GridLayout(
        Field(8, "765kk43"), Field(136, "765kk:43", 2), Field(168, "765kk43:210", 1), (Field(296, "765kk:4", 4),), 16
    ),
    "IQ3_XXS": GridLayout(Field(136, "765kk432"), None, Field(8, "765kk43:210", 1), SCALE_BITS, 32),
    "IQ3_S": GridLayout(
        Field(8, "765324kk"), Field(264, "765kk:432", 1), Field(296, "765kk10:432", 1), (Field(424, "65kk:7", 4),), 32
    ),
}


def grid_r4(
    name: str,
    levels: tuple[int, ...],
    step: float,
    raw: Tensor,
    heads: Tensor | None,
    out: Tensor,
    workspace: Workspace,
) -> None:
    """Dequantize blocks of four rows: d · ``step`` · (2 · scale + 1) · level · sign."""
    layout, of_entries = GRIDS_R4[name], 3 if name.startswith("IQ2") else 2
    bits = range(7, of_entries - 1, -1)
    index = gather((layout.lower,), raw, 4, bits, "lower", workspace).int()
    if layout.upper:
        index.add_(gather((layout.upper,), raw, 4, bits, "upper", workspace), alpha=256)
    found = look_up(_make_grid(name, levels, raw.device), index.view(-1), "levels", workspace)
    out.copy_(found.view(torch.int8).view(out.shape))
    minus = gather((layout.signs,), _undo_signs(name, raw), 4, range(7, -1, -1), "signs", workspace)
    out.mul_(minus.view(torch.int8).mul_(-2).add_(1))
    scales = gather(layout.scales, raw, 4, range(7, layout.part.bit_length() - 2, -1), "scales", workspace)
    units = read_halves(raw, 0, 4).unsqueeze(3) * ((scales * 2 + 1) * step)
    out.view(*scales.shape, -1).mul_(units.unsqueeze(4))


def _undo_signs(name: str, raw: Tensor) -> Tensor:
    """Return the bytes of blocks, with a byte of signs for eight elements where they are stored otherwise."""
    if name.endswith("XXS"):
        signs = raw & 0xFE
        return signs ^ signs >> 1
    if name == "IQ2_XS":
        signs = raw >> 1
        return signs ^ signs << 1
    return raw


def iq1_s_r4(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ1_S_R4 blocks of four rows: 24 bytes to 4 · 32 elements."""
    words = raw[:, :, 16:].contiguous().view(torch.int16).int().transpose(1, 2).unsqueeze(3)
    index = words >> torch.arange(0, 12, 3, dtype=torch.int32, device=raw.device) & 7 | words >> 12 & 8
    _unpack_eighths(index, raw, heads, (words >> 12 & 7) * 2 + 1, out, workspace)


def iq1_m_r4(raw: Tensor, heads: Tensor | None, out: Tensor, workspace: Workspace) -> None:
    """Dequantize IQ1_M_R4 blocks of four rows: 28 bytes to 4 · 32 elements."""
    index = gather((Field(16, "4kk:3", 4),), raw, 4, (4, 3), "upper", workspace).int()
    scales = gather((Field(24, "kk:4", 4),), raw, 4, (4,), "scales", workspace)
    _unpack_eighths(index, raw, heads, scales, out, workspace)


def _unpack_eighths(
    upper: Tensor, raw: Tensor, heads: Tensor | None, scales: Tensor, out: Tensor, workspace: Workspace
) -> None:
    """Write the elements of an IQ1 type, whose entries have these upper bits of their indices."""
    index = upper * 256 + gather((Field(0, "43kk"),), raw, 4, (4, 3), "lower", workspace)
    _look_up_eighths(index, out, workspace)
    if heads is not None:
        out.view(*scales.shape, -1).mul_((heads.unsqueeze(3) * (scales * 0.125)).unsqueeze(4))


def _read_integers(raw: Tensor, first: int, last: int, dtype: torch.dtype, workspace: Workspace) -> Tensor:
    """Return bytes ``first:last`` of each block as integers, int32 (n, integers)."""
    packed = workspace.buffer("packed", (len(raw), last - first), torch.uint8).copy_(raw[:, first:last])
    words = packed.view(dtype)
    return words if dtype == torch.int32 else workspace.buffer("words", tuple(words.shape), torch.int32).copy_(words)


def _look_up_eighths(index: Tensor, out: Tensor, workspace: Workspace) -> Tensor:
    """Write 8 · (level + delta) to ``out``; the highest bit of an index is the sign of delta."""
    return out.copy_(
        look_up(_make_shifted_levels(index.device), index, "levels", workspace).view(torch.int8).view(out.shape)
    )


def _apply_signs(levels: Tensor, signs: Tensor, out: Tensor) -> None:
    """Write the products of levels and signs, int8 numbers packed in wider integers, to ``out``."""
    out.copy_(levels.view(-1).view(torch.int8).mul_(signs.view(-1).view(torch.int8)).view(out.shape))


def _look_up_signs(words: Tensor, workspace: Workspace) -> Tensor:
    """Look up the signs of the four 7-bit fields in each word: int32 (n, 8) to int64 (n, 8, 4)."""
    index = workspace.buffer("index", (*words.shape, 4), torch.int32)
    for k in range(4):
        index[:, :, k] = words >> 7 * k & 127
    return look_up(_make_parity_signs(words.device), index, "signs", workspace)


def _read_scales(raw: Tensor, at: int) -> Tensor:
    """Return d · (scale + 1/2) / 4 for the 4-bit scales in the 8 bytes from ``at`` on: float32 (n, 16)."""
    packed = raw[:, at : at + 8]
    return read_half(raw, 0).mul(torch.stack([packed & 15, packed >> 4], 2).flatten(1) + 0.5).mul_(0.25)


@cache
def _decode_levels(name: str, levels: tuple[int, ...]) -> Tensor:
    """Decode all entries of a grid, int8 (entries, 8 or 4)."""
    packed = torch.tensor(list(base64.b85decode(GRIDS[name])), dtype=torch.uint8)
    bits = 2 if len(levels) == 3 else 4
    numbers = (packed[:, None] >> torch.arange(0, 8, bits, dtype=torch.uint8)) % (1 << bits)
    return torch.tensor(levels, dtype=torch.int8)[numbers.long()].view(-1, 8 if bits == 2 else 4)


@cache
def _make_grid(name: str, levels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each entry of a grid as one integer: int64, or int32 for entries of four levels."""
    return pack_integers(_decode_levels(name, levels)).to(device)


@cache
def _shift_levels() -> Tensor:
    """Return 8 · level + 1 for all IQ1 entries, then 8 · level - 1: int8 (4096, 8)."""
    eighths = 8 * _decode_levels("IQ1_S", TERNARY)
    return torch.cat([eighths + 1, eighths - 1])


@cache
def _make_shifted_levels(device: torch.device) -> Tensor:
    """Return :func:`_shift_levels` with each entry as one integer: int64 (4096,)."""
    return pack_integers(_shift_levels()).to(device)


@cache
def _make_parity_signs(device: torch.device) -> Tensor:
    """Return the eight int8 signs of each 7-bit index, packed in an int64: (128,). An even number of them is -1."""
    bits = (torch.arange(128)[:, None] >> torch.arange(7)) % 2
    bits = torch.cat([bits, bits.sum(1, keepdim=True) % 2], 1)
    return pack_integers((1 - 2 * bits).to(torch.int8)).to(device)


FORMATS = block_formats(
    (
        BlockType(
            "IQ1_S",
            "a grid of 2048, a scale for 32",
            iq1_s,
            32,
            2,
            (5, 7),
            table=_shift_levels,
            rows={"IQ1_S_R4": StoredRows(iq1_s_r4)},
        ),
        BlockType(
            "IQ1_M",
            "a grid of 2048, a scale for 16",
            iq1_m,
            16,
            2,
            (5, 7),
            table=_shift_levels,
            rows={"IQ1_M_R4": StoredRows(iq1_m_r4)},
        ),
        BlockType(
            "IQ2_XXS",
            "a grid of 256, a scale for 32",
            iq2_xxs,
            32,
            2,
            (8, 10),
            table=partial(_decode_levels, "IQ2_XXS", IQ2),
            rows={"IQ2_XXS_R4": StoredRows(partial(grid_r4, "IQ2_XXS", IQ2, 0.125))},
        ),
        BlockType(
            "IQ2_XS",
            "a grid of 512, a scale for 16",
            iq2_xs,
            16,
            2,
            (10, 12),
            table=partial(_decode_levels, "IQ2_XS", IQ2),
            rows={"IQ2_XS_R4": StoredRows(partial(grid_r4, "IQ2_XS", IQ2, 0.125))},
        ),
        BlockType(
            "IQ2_S",
            "a grid of 1024, a scale for 16",
            iq2_s,
            16,
            2,
            (11, 13),
            table=partial(_decode_levels, "IQ2_S", IQ2),
            rows={"IQ2_S_R4": StoredRows(partial(grid_r4, "IQ2_S", IQ2, 0.125))},
        ),
        BlockType(
            "IQ3_XXS",
            "a grid of 256 by fours, a scale for 32",
            iq3_xxs,
            32,
            3,
            (14, 16),
            table=partial(_decode_levels, "IQ3_XXS", IQ3_XXS),
            rows={"IQ3_XXS_R4": StoredRows(partial(grid_r4, "IQ3_XXS", IQ3_XXS, 0.25))},
        ),
        BlockType(
            "IQ3_S",
            "a grid of 512 by fours, a scale for 32",
            iq3_s,
            32,
            3,
            (16, 18),
            table=partial(_decode_levels, "IQ3_S", IQ3_S),
            rows={"IQ3_S_R4": StoredRows(partial(grid_r4, "IQ3_S", IQ3_S, 1.0))},
        ),
    ),
)
