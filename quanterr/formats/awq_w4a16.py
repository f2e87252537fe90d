"""AWQ W4A16 of comfy-kitchen: unsigned four-bit codes, a scale and an offset for each group of columns.

    weight          i8                (rows, cols / 2), two codes per byte, the first column in the low nibble
    weight_scale    f32, bf16, f16    (cols / group, rows)
    weight_zero     f32, bf16, f16    (cols / group, rows); weight_zeros in files of comfy-kitchen

    weight[r, c] = float32(code[r, c] - 8) * float32(weight_scale[c // group, r])        rounded
                   + float32(weight_zero[c // group, r])                                 rounded

The group follows from the shapes; a label with another group_size causes a warning. A modulation layer taken over from
Nunchaku may have interleaved rows (shared/adanorm_rows.py). The file does not show it: interleaving is tried if rows
in order do not match the original.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/tensor/awq_w4a16.py; Comfy-Org/comfy-quants@55f0a26
formats/awq_w4a16.py.
"""

from __future__ import annotations

from functools import partial

from quanterr.formats.base import (
    Chunk,
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
    Workspace,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.adanorm_rows import count_parts_by_name, find_stored_rows, read_ordered_rows
from quanterr.formats.shared.comfy_labels import FLOATS, INT8, check_labels
from quanterr.formats.shared.padding import Padded, fit_padded, read_padded
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import uniform
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor

LABELS = frozenset({"awq_w4a16"})
CODES = CodePacking("dense", 4)
LEVELS = element_types.list_integers(4, 8)
NEEDS = {
    "codes": PartSpec(("{weight}",), INT8),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
    "zero": PartSpec(("{weight}_zero", "{weight}_zeros"), FLOATS),
}


def fit(parts: Parts) -> Weight:
    """Return the weight with its rows in order, and as an alternative with interleaved rows."""
    comfy_format, warnings = check_labels(parts, LABELS)
    codes, scale, zero = parts.codes, parts["scale"], parts["zero"]
    rows, cols = (codes.shape[0], 2 * codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
    groups = scale.shape[0] if len(scale.shape) == 2 and scale.shape[1] == rows else 0
    if not groups or cols % (2 * groups) or zero.shape != scale.shape:
        raise FormatMismatch(f"its scale {scale} and zero {zero} should be [groups of columns, rows] for codes {codes}")
    group = cols // groups
    warnings += tuple(
        f"the {label.source} declares group_size {label.block[0]}, the shapes {group}; the shapes were used"
        for label in parts.hints.labels
        if label.block and label.block[0] != group
    )
    padded = fit_padded(parts, (rows, cols), group, 1)
    by_name = count_parts_by_name(parts.name.removesuffix(".weight"))
    alternatives = [
        parts.weight(
            padded.shape,
            _read(parts, padded, n),
            levels=uniform(4),
            block_size=(1, group),
            evidence=(f"4-bit codes in groups of {group}; rows " + (f"interleaved by {n}" if n > 1 else "in order"),),
            warnings=warnings,
            comfy_format=comfy_format,
            prescribed=comfy_format is not None,
        )
        for n in ((1, by_name) if by_name > 1 and rows % by_name == 0 else (1,))
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _read(parts: Parts, padded: Padded, interleaved: int) -> Decoder:
    """Return the decoder of the weight: float32(code - 8) · float32(scale) + float32(zero)."""
    cols, group = padded.stored_cols, padded.step
    if interleaved == 1:
        scale, zero = (Grid(parts[key], cols // group, group, turned=True, key=key) for key in ("scale", "zero"))
        decoder = Decoder(parts.codes, cols, levels=LEVELS, scale=scale, shift=zero, group=group)
        return read_padded(padded, decoder)
    of_weight = padded.rows, interleaved

    def read_codes(chunk: Chunk, workspace: Workspace) -> Tensor:
        order = find_stored_rows(chunk.row, chunk.stop_row, *of_weight, workspace.device)
        stored = workspace.read_whole("whole_codes", parts.codes)[order, chunk.col // 2 : chunk.stop_col // 2]
        return CODES.unpack(stored, 0, 2 * stored.shape[1])

    decoder = Decoder(
        parts.codes,
        cols,
        levels=LEVELS,
        scale=partial(read_ordered_rows, "whole_scale", parts["scale"], of_weight, group),
        shift=partial(read_ordered_rows, "whole_zero", parts["zero"], of_weight, group),
        group=group,
        read=read_codes,
    )
    return read_padded(padded, decoder)


FORMATS = (Format("awq_w4a16", NEEDS, fit, usual_db=(17, 19)),)
