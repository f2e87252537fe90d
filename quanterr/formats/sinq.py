"""SINQ: packed codes with a scale and a zero point for each group, and a scale for each column.

    W_q            u8, i32     packed codes, as HQQ's: shared/segmented_packing.py
    meta.scale2    floating    (1, cols)
    meta.scale     floating    (groups, 1); or meta.scale.x u8 (a, b), meta.scale.s and meta.scale.m (1, b) floating:
                               number g of all is x * s[g % b] + m[g % b]                       each rounds
    meta.zero      the same, or one number

    weight[r, c] = ((number(code[r, c]) - zero[group]) * scale[group]) * scale2[c]              each rounds

model.safetensors.index.json.meta.json gives each layer's shape, group_size, packing and method. The elements of a group
follow each other in a row. number(code) is the code, or with nf4 or nf3 in the method an entry of that table. Tiles of
rows and columns (2D) and codes of 5 and 6 bits are not read; scale2 already contains awq_scale.

Reference: sinq 0.2.0 (PyPI) sinq/quantizer.py Quantizer.dequantize, sinq/patch_model.py save_weights_safetensors.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import NamedTuple

from quanterr.checkpoints import SINQ_CONFIG
from quanterr.formats.base import (
    WEIGHT_SUFFIX,
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
    Workspace,
)
from quanterr.formats.shared.gptq_awq_common import FLOATS
from quanterr.formats.shared.segmented_packing import PACKINGS, Planes
from quanterr.kernel.grid import Grid, of_columns
from quanterr.kernel.levels import Levels
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.strict_json import as_object
from quanterr.util.text import display

BYTES = frozenset({"U8"})
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "nf3": (
        *(-1.0, -0.5350227355957031, -0.246931403875351, 0.0, 0.1833375245332718, 0.3819939494132996),
        *(0.6229856610298157, 1.0),
    ),
}


def _make_numbers(name: str) -> dict[str, PartSpec]:
    """Return the parts that numbers of groups may have, by role."""
    kinds = {"": FLOATS, ".x": BYTES, ".s": FLOATS, ".m": FLOATS}
    return {
        f"{name}{part}": PartSpec((f"{{module}}.meta.{name}{part}",), dtypes, optional=True)
        for part, dtypes in kinds.items()
    }


NEEDS = {
    "codes": PartSpec(("{module}.W_q",), frozenset({"U8", "I32"})),
    "columns": PartSpec(("{module}.meta.scale2",), FLOATS),
    **_make_numbers("scale"),
    **_make_numbers("zero"),
    "awq_scale": PartSpec(("{module}.meta.awq_scale",), FLOATS, optional=True),
}


class SinqLayout(NamedTuple):
    """The shape of a weight, the size of its groups, its codes and the table that they index, if any."""

    shape: tuple[int, int]
    size: int
    planes: Planes
    table: tuple[float, ...] | None


def fit(parts: Parts) -> Weight:
    """Return the weight that the checkpoint's JSON file describes."""
    layout = _read_layout(parts)
    (rows, cols), groups = layout.shape, prod(layout.shape) // layout.size
    if parts["columns"].shape != (1, cols):
        raise FormatMismatch(f"{parts['columns']} should be [1, {cols}]: tiles of rows and columns are not supported")
    codes_per_element = len(layout.planes.shifts)  # codes in an element; the last rows of elements may be padded
    if layout.planes.codes != -(-groups // codes_per_element) * codes_per_element * layout.size:
        raise FormatMismatch(f"{parts.codes} does not hold {rows} × {cols} codes of {layout.planes.bits} bits")
    for name in ("scale", "zero"):
        _check_numbers(parts, name, groups)
    last = 2.0**layout.planes.bits - 1
    return parts.weight(
        (rows, cols),
        _read(parts, layout),
        code_bits=layout.planes.bits,
        levels=None if layout.table else Levels(0x00, 0xFF, 0.0, last, at=(0.0, last)),
        block_size=(1, layout.size),
        evidence=(f"{layout.planes.bits}-bit codes {parts.codes}, groups of {layout.size}, a scale per column",),
    )


def _read_layout(parts: Parts) -> SinqLayout:
    meta = as_object(as_object(as_object(parts.hints.config.get(SINQ_CONFIG)).get(_name_module(parts))).get("meta"))
    if not meta:
        raise FormatMismatch(f"{SINQ_CONFIG} does not describe {display(_name_module(parts))}: its method is unknown")
    packing, method, shape, size = (meta.get(key) for key in ("packing", "method", "shape", "group_size"))
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise FormatMismatch(f"its packing {display(str(packing))} is not one of {', '.join(PACKINGS)}")
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise FormatMismatch(f"{SINQ_CONFIG} declares shape {display(str(shape))}, not rows and columns")
    rows, cols = shape
    if not isinstance(size, int) or size < 1 or cols % size or meta.get("axis") != 1:
        raise FormatMismatch(
            f"{SINQ_CONFIG} declares group_size {size} and axis {meta.get('axis')} for {rows} × {cols}"
        )
    itemsize, bits, shifts = PACKINGS[packing]
    table = next((table for name, table in TABLES.items() if name in str(method).lower()), None)
    return SinqLayout((rows, cols), size, Planes(parts.codes, itemsize, bits, shifts), table)


def _name_module(parts: Parts) -> str:
    return parts.name.removesuffix(WEIGHT_SUFFIX)


def _check_numbers(parts: Parts, name: str, groups: int) -> None:
    """Check the numbers of groups: stored as they are, or as bytes with steps and minima."""
    plain, (codes, step, minimum) = parts.get(name), (parts.get(f"{name}.{part}") for part in "xsm")
    if plain and not codes:
        fits = plain.shape == (groups, 1) or (name == "zero" and plain.n == 1)
    else:
        fits = bool(codes and step and minimum and not plain and codes.n == groups and len(codes.shape) == 2)
        fits = fits and codes is not None and {(1, codes.shape[1])} == {e.shape for e in (step, minimum) if e}
    if not fits:
        entries = [entry for entry in (plain, codes, step, minimum) if entry]
        raise FormatMismatch(
            f"there should be one {name} for each of {groups} groups, not {', '.join(map(str, entries)) or 'none'}"
        )


def _read(parts: Parts, layout: SinqLayout) -> Decoder:
    """Return the decoder of the weight: (number(code) - zero) · scale, times the factor of the column."""
    across = layout.shape[1] // layout.size
    scale, zero = (
        Grid(plain, across, layout.size, key=name)
        if (plain := parts.get(name))
        else partial(_read_numbers, parts, name, across, layout.size)
        for name in ("scale", "zero")
    )
    factor = of_columns(parts["columns"], "columns")
    return layout.planes.decode(layout.shape, layout.size, scale, zero, levels=layout.table or (), factor=factor)


def _read_numbers(parts: Parts, name: str, across: int, size: int, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the scales or zero points of a chunk that are bytes with steps and minima, (r, groups) float32."""
    codes, step, minimum = (parts[f"{name}.{part}"] for part in "xsm")
    numbers = workspace.read(f"{name}.x", codes, chunk.row * across, (chunk.shape[0], across)).float()
    groups = torch.arange(chunk.row * across, chunk.stop_row * across, device=workspace.device).view(numbers.shape)
    for role, entry, operation in (("s", step, torch.Tensor.mul_), ("m", minimum, torch.Tensor.add_)):
        of_places = workspace.read_whole(f"{name}.{role}", entry).view(-1).float()
        operation(numbers, of_places[groups % codes.shape[1]])
    return numbers[:, chunk.col // size : -(-chunk.stop_col // size)]


FORMATS = (
    Format("sinq", NEEDS, fit, summary="SINQ: packed codes, a scale and a zero point per group, a scale per column"),
)
