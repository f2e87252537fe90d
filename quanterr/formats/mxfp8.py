"""MXFP8: E4M3 codes with an E8M0 exponent per 32 columns.

    weight          f8_e4m3           (rows, cols), or (experts, rows, cols)
    weight_scale    u8 or f8_e8m0     (rows, cols / 32), or the same in tiles: shared/swizzled_scales.py

    weight[r, c] = float32(code[r, c]) * 2^(scale[r, c // 32] - 127)                  exact, except for underflow

ComfyUI stores scales in tiles and pads rows and columns to multiples of 32; only the original, or the label's
orig_shape, gives the true shape. Others (compressed-tensors, ModelOpt, transformers) store them in rows. If both shapes
coincide, a ComfyUI label prescribes tiles, and a quantization_config that names one of the others prescribes rows; with
neither, rows are tried first, and the original decides. The weight_scalar of hybrid files is not read: only
machines without MX units need it.

Reference: Comfy-Org/comfy-kitchen@7d86acf comfy_kitchen/float_utils.py; silveroxides/convert_to_quant@1.3.4
formats/hybrid_mxfp8_conversion.py; vllm-project/compressed-tensors@ac8e2ba8 compressors/mxfp8/base.py.
"""

from quanterr.formats.base import Format, Parts, PartSpec, Weight
from quanterr.formats.shared.comfy_labels import FP8_LABELS, MXFP8_LABELS, check_labels
from quanterr.formats.shared.config_checks import find_declared_method
from quanterr.formats.shared.microscaling import read_microscaled
from quanterr.formats.shared.padding import fit_padded
from quanterr.formats.shared.swizzled_scales import fit_block_scales
from quanterr.kernel.grid import E8M0
from quanterr.kernel.levels import E4M3

BLOCK = 32
LABELS = FP8_LABELS | MXFP8_LABELS
# Values of quant_method whose loaders read the scales row by row.
METHODS_WITH_ROW_ORDER = ("modelopt", "compressed-tensors", "fp8", "mxfp8", "quark")
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"F8_E4M3"})),
    "scale": PartSpec(("{weight}_scale", "{weight}_scale_inv"), frozenset({"U8", "F8_E8M0"})),
    "scalar": PartSpec(("{weight}_scalar",), frozenset({"F32"}), optional=True),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if there is an exponent per 32 columns."""
    codes, scale = parts.codes, parts["scale"]
    stored_rows, stored_cols = codes.shape[-2:] if len(codes.shape) > 1 else (0, 0)
    experts = codes.shape[0] if len(codes.shape) == 3 else 1
    layouts = fit_block_scales(scale, stored_rows, -(-stored_cols // BLOCK), experts, BLOCK, E8M0)
    if not layouts:
        return None
    comfy_format, warnings = check_labels(parts, LABELS)
    if comfy_format is not None:
        layouts = layouts[::-1]  # tiles first
    declared = None if comfy_format else find_declared_method(parts.hints.config, *METHODS_WITH_ROW_ORDER)
    padded = fit_padded(parts, codes.shape, BLOCK)
    alternatives = [
        parts.weight(
            padded.shape,
            read_microscaled(codes, "e4m3", padded, layout),
            code_bits=8,
            levels=E4M3.centred_levels,
            block_size=(1, BLOCK),
            evidence=(
                f"codes {codes.dtype}, exponents {scale} in {'tiles' if layout.tiles else 'rows'}"
                + (f", as {declared} prescribes" if declared and not layout.tiles else ""),
            ),
            warnings=warnings,
            comfy_format=comfy_format,
            prescribed=bool(comfy_format or declared),
        )
        for layout in layouts
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


FORMATS = (Format("mxfp8", NEEDS, fit, usual_db=(30, 32), corrects_biases=True),)
