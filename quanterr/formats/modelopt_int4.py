"""ModelOpt INT4 (W4A16_AWQ, W4A8_AWQ): signed integers of 4 bits, two rows in a byte.

    weight             u8       (rows / 2, cols), or (experts, rows / 2, cols): the even row in the low nibble
    weight_scale       f32      (rows, blocks), or (experts, rows, blocks)
    pre_quant_scale    floating (cols,), if the layer multiplies its input by it; optional
    weight_scale_2     f32      one, by which a runtime scales the weight to FP8; not read, optional

    weight[r, c] = float32(code[r, c]) * weight_scale[r, block of c]                    rounded
                   * pre_quant_scale[c], if stored                                      rounded

Reference: NVIDIA/Model-Optimizer@a2fbac7b modelopt/torch/export/quant_utils.py pack_int4_in_uint8.
"""

from quanterr.formats.base import Format, Parts, PartSpec, Weight
from quanterr.formats.shared.column_groups import fit_blocks
from quanterr.formats.shared.padding import check_width
from quanterr.formats.shared.pre_quant_scale import PART, fit_pre_scale
from quanterr.formats.shared.row_pairs import read_pairs_of_rows
from quanterr.kernel.levels import INT4

FLOATS = frozenset({"F32", "BF16", "F16"})
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"U8"})),
    "scale": PartSpec(("{weight}_scale",), FLOATS),
    "pre_quant_scale": PART,
    "runtime_scale": PartSpec(("{weight}_scale_2",), frozenset({"F32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if there are twice as many rows of scales as of codes."""
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) not in (2, 3) or len(scale.shape) != len(codes.shape):
        return None
    shape = (*codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1])
    if scale.shape[:-1] != shape[:-1]:
        return None
    check_width(parts, shape)
    size = parts.hints.config.get("group_size")
    blocks = fit_blocks(scale.shape[-1], shape[-1], size if isinstance(size, int) else None)
    return parts.weight(
        shape,
        read_pairs_of_rows(
            codes,
            blocks.grid(scale),
            blocks.group,
            factor=fit_pre_scale(parts, shape[-1]),
        ),
        block_size=blocks.edges,
        levels=INT4,
        scale=scale,
        evidence=(f"two rows of 4-bit codes in each of {codes}, scale {scale}",),
        warnings=blocks.warnings,
    )


FORMATS = (Format("modelopt_int4", NEEDS, fit, usual_db=(17, 22)),)
