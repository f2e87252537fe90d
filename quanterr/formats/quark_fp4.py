"""AMD Quark FP4 (amdfp4): E2M1 codes, and an E5M3 scale for each 16 or 32 columns.

    weight            u8     (rows, cols / 2)
    weight_scale      u8     (rows, cols / 16) or (rows, cols / 32): E5M3, without a sign, bias 15
    weight_scale_2    f32    one, optional

    weight[r, c] = e2m1(code[r, c]) * (e5m3(scale[r, block of c]) * weight_scale_2)    the product of scales is rounded

Two codes are in a byte, the first in the low bits. With 32 columns only the configuration (scale_format, fp8_e5m3), or
the original, tells this from MXFP4; with weight_scale_2 from NVFP4.

Reference: amd-quark 0.13, quark/torch/quantization/config/config.py AmdFP4Spec, quark/torch/kernel/float8_e5m3/
lookup.py, quark/torch/utils/pack.py Pack_fp4.
"""

from math import prod

from quanterr.formats.base import Format, FormatMismatch, Part, Parts, Weight
from quanterr.formats.shared.microscaling import Microscaled, e5m3, times
from quanterr.formats.shared.padding import unpadded
from quanterr.formats.shared.quark_config import has_e5m3_scales, specifications
from quanterr.formats.shared.swizzled_scales import BlockScales
from quanterr.tensors.levels import E2M1

BYTES = frozenset({"U8"})
NEEDS = {
    "codes": Part(("{weight}",), BYTES),
    "scale": Part(("{weight}_scale",), BYTES),
    "global_scale": Part(("{weight}_scale_2",), frozenset({"F32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """The weight, if its scales are said to be E5M3, or nothing is said and no other format has 16 columns."""
    codes, scale, global_scale = parts.codes, parts["scale"], parts.get("global_scale")
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else (0,)
    block = next((size for size in (16, 32) if scale.shape == (*shape[:-1], -(-shape[-1] // size))), None)
    undeclared = not has_e5m3_scales(parts)
    if undeclared and (specifications(parts) or block != 16 or global_scale):
        return None
    if block is None or (global_scale is not None and global_scale.n != 1):
        raise FormatMismatch(f"its scale {scale} has no E5M3 number for each 16 or 32 columns of {codes}")
    scales = BlockScales(scale, prod(shape[:-1]), scale.shape[-1], 1, tiled=False)
    rows = prod(shape[:-1])
    scale_of = times(global_scale, rows, e5m3) if global_scale else e5m3
    return parts.weight(
        shape,
        Microscaled(codes, "e2m1", unpadded(parts, shape, block), scales, scale_of).native,
        code_bits=4,
        levels=E2M1.scaled,
        block_size=(1, block),
        evidence=(f"codes {codes}, E5M3 scales {scale}",),
    )


FORMATS = (Format("quark_fp4", NEEDS, fit, usual_db=(17, 21)),)
