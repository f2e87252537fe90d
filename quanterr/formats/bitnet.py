"""BitNet: ternary codes, four rows per byte, and one scale.

    weight          u8                 (rows / 4 rounded up, cols): bits 2 i and 2 i + 1 of stored row r hold row
                                       i · (rows / 4 rounded up) + r of the weight
    weight_scale    bf16, f16, f32     one

    weight[r, c] = (code - 1) / float32(weight_scale)        linear_class bitlinear           rounded
                 = (code - 1) * float32(weight_scale)        linear_class autobitlinear       rounded

config.json gives the linear_class; the default is bitlinear. If the original contradicts it, the other is tried.

Reference: huggingface/transformers@5.23.0 src/transformers/integrations/bitnet.py.
"""

from quanterr.formats.base import Decoder, Format, FormatMismatch, Order, Parts, PartSpec, Weight
from quanterr.formats.shared.config_checks import check_quant_method
from quanterr.kernel.decoder import SharedBytes
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import TERNARY

PER_BYTE = 4
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"U8"})),
    "scale": PartSpec(("{weight}_scale",), frozenset({"BF16", "F16", "F32"})),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if there is one scale; a quarter of the original's rows, rounded up, must be stored."""
    codes, scale = parts["codes"], parts["scale"]
    if len(codes.shape) != 2 or scale.n != 1:
        return None
    stored, cols = codes.shape
    shape = parts.hints.shape or (PER_BYTE * stored, cols)
    if len(shape) != 2 or -(-shape[0] // PER_BYTE) != stored or shape[1] != cols:
        raise FormatMismatch(
            f"{codes} with one scale is a BitNet weight of {PER_BYTE * stored} × {cols}, not {list(shape)}"
        )
    multiplies = parts.hints.config.get("linear_class") == "autobitlinear"
    alternatives = [
        parts.weight(
            (shape[0], cols),
            _read(parts, product),
            code_bits=2,
            levels=TERNARY,
            scale=scale,
            evidence=(f"BitNet, ternary codes {'times' if product else 'divided by'} {scale}",),
            warnings=check_quant_method(parts, "bitnet"),
            prescribed="linear_class" in parts.hints.config,
        )
        for product in (multiplies, not multiplies)
    ]
    return alternatives[0].with_alternatives(alternatives[1:])


def _read(parts: Parts, product: bool) -> Decoder:
    """Return the decoder of the weight: (code - 1) times the scale, or divided by it."""
    codes = parts.codes
    rows, cols = codes.shape
    return Decoder(
        codes,
        cols,
        levels=(-1.0, 0.0, 1.0, 2.0),
        # The product of these levels with a rounded quotient is their rounded quotient.
        scale=Grid(parts["scale"], steps=() if product else (("reciprocal", None),)),
        order=Order.SHARED_BYTES,
        shared=SharedBytes(rows, (0, 2, 4, 6), 2),
    )


FORMATS = (Format("bitnet", NEEDS, fit, usual_db=(5, 6)),)
