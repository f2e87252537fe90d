"""MXFP4 and MXFP6: small floats with an E8M0 exponent per 32 columns.

    mxfp4           weight           u8, i8 (rows, cols / 2), or f4 (rows, cols)
                    weight_scale     u8 or f8_e8m0    (rows, cols / 32); also called scale
    ct_mxfp4        weight_packed    u8               (rows, cols / 2)
                    weight_scale     u8               (rows, cols / 32)
    mxfp6_e2m3, mxfp6_e3m2
                    weight           u8               (rows, 3·cols / 4)
                    weight_scale     u8 or f8_e8m0    (rows, cols / 32)
    ct_mxfp6        weight_packed    u8               (rows, 3·cols / 4)
                    weight_scale     u8               (rows, cols / 32)
    gpt_oss_mxfp4   X_blocks         u8               (experts, rows, cols / 32, 16)
                    X_scales         u8               (experts, rows, cols / 32); also X.blocks and X.scales

    weight[r, c] = e2m1(code[r, c]) * 2^(scale[r, c // 32] - 127)                     exact, except for underflow

E2M1 codes are two in a byte, the first in the low bits; E2M3 and E3M2 codes (MXFP6) are four in three bytes, the first
in the lowest bits. Quark's configuration (dtype) or else the original distinguishes them; compressed-tensors writes
E2M3 only. All may have experts as a leading axis. mxfp4 is written by ModelOpt, Quark and MiMo, and by DeepSeek-V4 for
its experts, as int8 with a scale named scale. gpt-oss stores outputs as rows in this form, but as columns in its
unquantized checkpoints. compressed-tensors 0.13 wrote MXFP4 exponents that are 2 too small.

Reference: OCP Microscaling Formats (MX) 1.0; NVIDIA/Model-Optimizer@a2fbac7b modelopt/torch/quantization/qtensor/
mxfp4_tensor.py; vllm-project/compressed-tensors@ac8e2ba8 compressors/mxfp4/base.py and mxfp6/base.py;
openai/gpt-oss@7b583341 gpt_oss/torch/weights.py; huggingface/transformers@5.23.0 integrations/mxfp4.py and
integrations/finegrained_fp8.py (DeepSeek-V4).
"""

from functools import partial

from msgspec.structs import replace

from quanterr.formats.base import Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.microscaling import CODE_BITS, LEVELS, SmallFloat, read_microscaled
from quanterr.formats.shared.padding import Padded, fit_unpadded
from quanterr.formats.shared.quark_config import find_specifications, has_e5m3_scales
from quanterr.formats.shared.swizzled_scales import fit_block_scales
from quanterr.kernel.grid import E8M0, Grid

BLOCK = 32
SIX_BIT_TYPES: tuple[SmallFloat, ...] = ("e2m3", "e3m2")  # the likelier first
BYTES = frozenset({"U8"})
EXPONENTS = frozenset({"U8", "F8_E8M0"})
SCALES = ("{weight}_scale", "{weight}_weight_scale", "{module}.scale")

MXFP6 = {"codes": PartSpec(("{weight}",), BYTES), "scale": PartSpec(SCALES, EXPONENTS)}
MXFP4 = {"codes": PartSpec(("{weight}",), frozenset({"U8", "I8", "F4"})), "scale": PartSpec(SCALES, EXPONENTS)}
PACKED_PARTS = {"codes": PartSpec(("{weight}_packed",), BYTES), "scale": PartSpec(("{weight}_scale",), EXPONENTS)}
GPT_OSS = {
    "codes": PartSpec(("{weight}_blocks", "{weight}.blocks"), BYTES),
    "scale": PartSpec(("{weight}_scales", "{weight}.scales"), BYTES),
}
OLD_EXPONENTS = "0.13"  # prefix of the compressed-tensors versions that wrote exponents 2 too small


def fit_mxfp4(parts: Parts) -> Weight | None:
    """Return the weight if there is an exponent per 32 columns and nothing declares that these are E5M3 numbers."""
    if has_e5m3_scales(parts):
        return None
    codes = parts.codes
    if len(codes.shape) not in (2, 3):
        raise FormatMismatch(f"MXFP4 codes are (rows, cols / 2) or (experts, rows, cols / 2), not {codes}")
    cols = codes.shape[-1] if codes.dtype == "F4" else 2 * codes.shape[-1]
    return _fit(parts, "e2m1", (*codes.shape[:-1], cols))


def fit_mxfp6(element: SmallFloat, parts: Parts) -> Weight | None:
    """Return the weight unless its codes are declared as the other type; if undeclared, the other is an alternative."""
    codes = parts.codes
    if len(codes.shape) not in (2, 3) or codes.shape[-1] % 24:
        return None
    shape = (*codes.shape[:-1], codes.shape[-1] * 4 // 3)
    if parts["scale"].shape != (*shape[:-1], shape[-1] // BLOCK):
        return None
    declared = {str(specification.get("dtype")) for specification in find_specifications(parts)}
    if declared:
        return _fit(parts, element, shape) if f"fp6_{element}" in declared else None
    if element != SIX_BIT_TYPES[0]:
        return None
    first, *others = [
        replace(_fit(parts, six_bit_type, shape), format=f"mxfp6_{six_bit_type}") for six_bit_type in SIX_BIT_TYPES
    ]
    return replace(first.with_alternatives(others), undeclared=True)


def fit_packed(element: SmallFloat, parts: Parts) -> Weight | None:
    """Return the weight of compressed-tensors if it has codes of this type."""
    codes, scale = parts.codes, parts["scale"]
    if len(codes.shape) not in (2, 3) or not codes.shape[-1]:
        raise FormatMismatch(f"MXFP4 and MXFP6 codes are (rows, bytes) or (experts, rows, bytes), not {codes}")
    kinds = {packed_type: codes.shape[-1] * 8 // CODE_BITS[packed_type] for packed_type in ("e2m1", "e2m3")}
    fitting = [
        packed_type for packed_type, cols in kinds.items() if scale.shape == (*codes.shape[:-1], -(-cols // BLOCK))
    ]
    if not fitting:
        raise FormatMismatch(
            f"its scale {scale} has an exponent per 32 columns neither of MXFP4 nor of MXFP6 in {codes}: "
            f"expected {' or '.join(str([*codes.shape[:-1], -(-cols // BLOCK)]) for cols in kinds.values())}"
        )
    if element not in fitting:
        return None
    old = parts.format == "ct_mxfp4" and str(parts.hints.config.get("version", "")).startswith(OLD_EXPONENTS)
    warnings = (
        "written by compressed-tensors 0.13, whose MXFP4 exponents are 2 too small: readers get a quarter of "
        "each weight; quantize it again with a later version",
    )
    return _fit(parts, element, (*codes.shape[:-1], kinds[element]), warnings if old else ())


def fit_gpt_oss(parts: Parts) -> Weight:
    """Return the weight, (experts, out, in)."""
    codes = parts.codes
    if len(codes.shape) < 3 or codes.shape[-1] != BLOCK // 2 or parts["scale"].shape != codes.shape[:-1]:
        raise FormatMismatch(
            f"its blocks {codes} should be (experts, rows, cols / 32, 16), "
            f"and its scales {parts['scale']} the same without the last axis"
        )
    shape = (*codes.shape[:-2], codes.shape[-2] * BLOCK)
    scales = Grid(parts["scale"], codes.shape[-2], BLOCK, levels=E8M0)
    return _make_weight(parts, "e2m1", fit_unpadded(parts, shape, BLOCK), scales)


def _fit(parts: Parts, element: SmallFloat, stored: tuple[int, ...], warnings: tuple[str, ...] = ()) -> Weight:
    experts = stored[0] if len(stored) == 3 else 1
    layouts = fit_block_scales(parts["scale"], stored[-2], -(-stored[-1] // BLOCK), experts, BLOCK, E8M0)
    if not layouts or layouts[0].tiles:
        raise FormatMismatch(
            f"its scale {parts['scale']} does not fit {parts.codes}: expected an exponent per 32 columns, "
            f"{[*stored[:-1], -(-stored[-1] // BLOCK)]}"
        )
    return _make_weight(parts, element, fit_unpadded(parts, stored, BLOCK), layouts[0], warnings)


def _make_weight(
    parts: Parts,
    element: SmallFloat,
    padded: Padded,
    scales: Grid,
    warnings: tuple[str, ...] = (),
) -> Weight:
    return parts.weight(
        padded.shape,
        read_microscaled(parts.codes, element, padded, scales),
        code_bits=CODE_BITS[element],
        levels=LEVELS[element],
        block_size=(1, BLOCK),
        scale=parts["scale"],
        evidence=(f"codes {parts.codes}, exponents {parts['scale']}",),
        warnings=warnings,
    )


FORMATS = (
    Format(
        "mxfp4",
        MXFP4,
        fit_mxfp4,
        summary="MXFP4: E2M1 codes, an E8M0 exponent per 32 columns (ModelOpt, Quark, DeepSeek-V4, MiMo)",
        usual_db=(17, 19),
    ),
    *(
        Format(
            f"mxfp6_{code_type}",
            MXFP6,
            partial(fit_mxfp6, code_type),
            summary=f"MXFP6: {code_type.upper()} codes, an E8M0 exponent per 32 columns (Quark)",
            usual_db=usual_db,
        )
        for code_type, usual_db in zip(SIX_BIT_TYPES, ((27, 29), (24, 26)), strict=True)
    ),
    Format(
        "ct_mxfp4",
        PACKED_PARTS,
        partial(fit_packed, "e2m1"),
        summary="compressed-tensors mxfp4-pack-quantized: E2M1 codes, an E8M0 exponent per 32 columns",
        usual_db=(17, 19),
    ),
    Format(
        "ct_mxfp6",
        PACKED_PARTS,
        partial(fit_packed, "e2m3"),
        summary="compressed-tensors mxfp6-pack-quantized: E2M3 codes, an E8M0 exponent per 32 columns",
        usual_db=(27, 29),
    ),
    Format(
        "gpt_oss_mxfp4",
        GPT_OSS,
        fit_gpt_oss,
        summary="gpt-oss: MXFP4 in blocks of 16 bytes, with their exponents",
        usual_db=(17, 19),
    ),
)
