"""Asym W4A8: codes of 4 or 6 bits that a group scale turns into INT8, with rotated columns.

    weight              i8                  (rows, cols · bits / 8)
    weight_s_rel        f8_e4m3, u8, f32    (rows, cols / group); u8 holds the bits of E4M3
    weight_s_channel    f32                 (rows,)
    weight_codebook     f32                 (16,); optional, with 4 bits only
    weight_correction   f32, bf16           (cols / group, rows); optional, with 4 bits only

    code       4 bits: two per byte, the first column in the low nibble
               6 bits: the low four bits as above, in the first cols / 2 bytes of the row; the upper two bits of
               column c at bits 2 (c % 4) and up of byte cols / 2 + c // 4
    v          codebook[code], or float32(code - 2^(bits - 1))
    u          v * float32(s_rel[r, c // group]), rounded half to even, within -127 … 127          rounded
    rotated    u * s_channel[r]                                                                    rounded
               + float32(correction[c // group, r])                                                rounded
    weight     rotated, un-rotated in groups of columns: kernel/rotation.py              rounded

The label gives the group (group_size, default 16) and the group of the rotation (convrot_groupsize, default 256); the
number of bits follows from the shapes. ComfyUI 0.30 does not read weight_correction, comfy-kitchen does.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/w4a8_int8.py, backends/eager/w4a8_int8.py.
"""

from __future__ import annotations

from functools import partial
from math import lcm

from msgspec import Struct
from msgspec.structs import replace

from quanterr.formats.base import (
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    RotatedWeight,
    Weight,
    Workspace,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.comfy_labels import INT8, check_labels
from quanterr.formats.shared.config_checks import read_floats
from quanterr.formats.shared.convrot import find_group_size, rotate
from quanterr.formats.shared.padding import Padded, fit_padded, read_padded
from quanterr.kernel.grid import Grid
from quanterr.kernel.interpreter import Nested
from quanterr.kernel.levels import nibbles, uniform
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor

LABELS = frozenset({"asym_w4a8_int8"})
GROUP = 16
NEEDS = {
    "codes": PartSpec(("{weight}",), INT8),
    "s_rel": PartSpec(("{weight}_s_rel",), frozenset({"F8_E4M3", "U8", "F32"})),
    "s_channel": PartSpec(("{weight}_s_channel",), frozenset({"F32"})),
    "codebook": PartSpec(("{weight}_codebook",), frozenset({"F32"}), optional=True),
    "correction": PartSpec(("{weight}_correction",), frozenset({"F32", "BF16"}), optional=True),
}
BITS = (4, 6)


class W4A8Layout(Struct, frozen=True):
    """The layout of one weight's codes."""

    bits: int
    group: int
    rotation: int
    padded: Padded


def fit(parts: Parts) -> Weight:
    """Return the weight; the shapes of its parts give the number of bits."""
    comfy_format, warnings = check_labels(parts, LABELS, rotates=True)
    layout, warning = _fit_layout(parts)
    if parts.get("correction"):
        warnings += ("weight_correction is added, as comfy-kitchen does; ComfyUI 0.30 leaves it out",)
    plain = parts.weight(
        layout.padded.shape,
        _read(parts, layout, 0),
        code_bits=layout.bits,
        block_size=(1, layout.group),
    )
    levels = uniform(layout.bits)
    if table := parts.get("codebook"):
        levels = nibbles(read_floats(table))
    plain = replace(plain, levels=levels)  # INT8 rounding then moves each level by at most half an INT8 step
    description = f"codes of {layout.bits} bits in groups of {layout.group}, rotated in groups of {layout.rotation}"
    return parts.weight(
        layout.padded.shape,
        _read(parts, layout, layout.rotation),
        code_bits=layout.bits,
        block_size=(1, layout.group),
        evidence=(description,),
        warnings=warnings + warning,
        comfy_format=comfy_format,
        rotated=RotatedWeight(plain, partial(rotate, layout.rotation)),
    )


def _fit_layout(parts: Parts) -> tuple[W4A8Layout, tuple[str, ...]]:
    codes, s_rel, s_channel = parts.codes, parts["s_rel"], parts["s_channel"]
    label = next(iter(parts.hints.labels), None)
    group = (label and label.number("group_size")) or GROUP
    rows = codes.shape[0] if len(codes.shape) == 2 else 0
    if not rows or len(s_rel.shape) != 2 or s_rel.shape[0] != rows or s_channel.shape != (rows,):
        raise FormatMismatch(
            f"its scales {s_rel} and {s_channel} should have a row of groups, and one number, for each row of {codes}"
        )
    cols = s_rel.shape[1] * group
    of_bits = {cols * n // 8: n for n in BITS}.get(codes.shape[1])
    if of_bits is None:
        raise FormatMismatch(f"{codes} with scales {s_rel} in groups of {group} are not {cols} columns of 4 or 6 bits")
    shapes = {"codebook": (16,), "correction": (s_rel.shape[1], rows)}
    for role, shape in shapes.items():
        part = parts.get(role)
        if part and (of_bits != 4 or part.shape != shape):
            raise FormatMismatch(f"{part} should be {list(shape)} for 4-bit codes; these have {of_bits}")
    rotation, warning = find_group_size(label, cols)
    padded = fit_padded(parts, (rows, cols), lcm(group, rotation), 1)
    return W4A8Layout(of_bits, group, rotation, padded), warning


def _read(parts: Parts, layout: W4A8Layout, rotation: int) -> Decoder:
    """Return the decoder of the weight: INT8 values times the scales of rows, plus the correction.

    ``rotation`` is 0 for the weight whose columns are still rotated.
    """
    codes, cols, group, s_rel = parts.codes, layout.padded.stored_cols, layout.group, parts["s_rel"]
    across, table, read = cols // group, parts.get("codebook"), None
    if layout.bits == 6:
        low, high = (
            Grid(codes, codes.shape[1] * 8 // bits, 1, key="codes", packing=CodePacking("dense", bits))
            for bits in (4, 2)
        )
        read = partial(_read_six_bits, low, high, 2 * cols)
    inner = Decoder(
        codes,
        cols,
        levels=read_floats(table) if table else element_types.list_integers(layout.bits, 1 << layout.bits - 1),
        scale=Grid(s_rel, across, group, key="s_rel", levels=() if s_rel.dtype == "F32" else element_types.E4M3),
        group=group,
        read=read,
    )
    correction = parts.get("correction")
    decoder = Decoder(
        codes,
        cols,
        scale=Grid(parts["s_channel"]),
        shift=Grid(correction, across, group, turned=True, key="correction") if correction else None,
        group=group,
        rotation=rotation,
        read=Nested(inner, (-127, 127)),
    )
    return read_padded(layout.padded, decoder)


def _read_six_bits(low: Grid, high: Grid, offset: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the codes of a chunk, (r, c): four bits in order, and two bits from column ``offset`` of such codes on."""
    upper = chunk._replace(col=offset + chunk.col, stop_col=offset + chunk.stop_col)
    return low(chunk, workspace) + 16 * high(upper, workspace)


FORMATS = (Format("asym_w4a8_int8", NEEDS, fit, usual_db=(21, 35)),)
