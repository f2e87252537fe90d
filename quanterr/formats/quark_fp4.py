"""AMD Quark FP4 (amdfp4): E2M1 codes with an E5M3 scale per 16 or 32 columns.

    weight            u8     (rows, cols / 2)
    weight_scale      u8     (rows, cols / 16) or (rows, cols / 32): E5M3, without a sign, bias 15
    weight_scale_2    f32    one, optional

    weight[r, c] = e2m1(code[r, c]) * (e5m3(scale[r, block of c]) * weight_scale_2)    the product of scales is rounded

A byte holds two codes, the first in the low bits. With 32 columns only the configuration (scale_format, fp8_e5m3)
distinguishes this from MXFP4; with weight_scale_2, only it distinguishes this from NVFP4.

Reference: amd-quark 0.13, quark/torch/quantization/config/config.py AmdFP4Spec, quark/torch/kernel/float8_e5m3/
lookup.py, quark/torch/utils/pack.py Pack_fp4.
"""

from quanterr.formats.base import Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.microscaling import make_e5m3_weight
from quanterr.formats.shared.quark_config import find_specifications, has_e5m3_scales

BYTES = frozenset({"U8"})
NEEDS = {
    "codes": PartSpec(("{weight}",), BYTES),
    "scale": PartSpec(("{weight}_scale",), BYTES),
    "global_scale": PartSpec(("{weight}_scale_2",), frozenset({"F32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if its scales are declared as E5M3, or if undeclared scales are for 16 columns each."""
    codes, scale, global_scale = parts.codes, parts["scale"], parts.get("global_scale")
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else (0,)
    block = next((size for size in (16, 32) if scale.shape == (*shape[:-1], -(-shape[-1] // size))), None)
    undeclared = not has_e5m3_scales(parts)
    if undeclared and (find_specifications(parts) or block != 16 or global_scale):
        return None
    if block is None or (global_scale is not None and global_scale.n != 1):
        raise FormatMismatch(f"its scale {scale} has no E5M3 number per 16 or 32 columns of {codes}")
    return make_e5m3_weight(parts, shape, block, global_scale)


FORMATS = (Format("quark_fp4", NEEDS, fit, usual_db=(17, 21)),)
