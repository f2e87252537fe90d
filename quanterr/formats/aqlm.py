"""AQLM: each group of weights is a sum of vectors from codebooks, times a scale.

    codes        i8, i16, i32      (rows / out, cols / in, n): indices into n codebooks; the low bits count, unsigned
    codebooks    f16, bf16, f32    (n, 2^bits, out, in): vectors for groups of out rows and in columns
    scales       f16, bf16, f32    (rows / out, 1, 1, 1), or one per group, or one per weight of a group

    weight[group] = (codebooks[0, code[0]] + codebooks[1, code[1]] + …) * scale       each sum and product rounded

Reference: Vahe1994/AQLM@e79a896e inference_lib/src/aqlm/utils.py _dequantize_weight.
"""

from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.config_checks import check_quant_method
from quanterr.formats.shared.custom import Custom, Stored
from quanterr.lazy_torch import Tensor
from quanterr.util.text import count

FLOATS = frozenset({"F16", "BF16", "F32"})
CODE_BITS = {"I8": 8, "I16": 16, "I32": 32}
SETTINGS = ("num_codebooks", "nbits_per_codebook", "out_group_size", "in_group_size")  # in config.json
NEEDS = {
    "codes": PartSpec(("{module}.codes",), frozenset(CODE_BITS)),
    "codebooks": PartSpec(("{module}.codebooks",), FLOATS),
    "scales": PartSpec(("{module}.scales",), FLOATS),
}


def fit(parts: Parts) -> Weight:
    """Return the weight, whose shape follows from the groups of codes."""
    codes, books, scales = parts["codes"], parts["codebooks"], parts["scales"]
    if len(codes.shape) != 3 or len(books.shape) != 4 or codes.shape[2] != books.shape[0]:
        raise FormatMismatch(
            f"AQLM has codes (rows, cols, n) and codebooks (n, 2^bits, out, in), not {codes} and {books}"
        )
    n, size, out, into = books.shape
    if size & (size - 1) or not 2 <= size <= 1 << CODE_BITS[codes.dtype]:
        raise FormatMismatch(f"{books} should hold a power of two of vectors, no more than {codes} can index")
    groups = (*codes.shape[:2], out, into)
    if len(scales.shape) != 4 or any(have not in (1, full) for have, full in zip(scales.shape, groups, strict=True)):
        raise FormatMismatch(f"its scale {scales} should be {[codes.shape[0], 1, 1, 1]}, or up to {list(groups)}")
    bits = size.bit_length() - 1
    from_shapes = dict(zip(SETTINGS, (n, bits, out, into), strict=True))
    declared = {name: parts.hints.config[name] for name in SETTINGS if name in parts.hints.config}
    differences = [
        f"{name} {declared[name]} for {from_shapes[name]}" for name in declared if declared[name] != from_shapes[name]
    ]
    warnings = (f"config.json declares {', '.join(differences)}, but the shapes decide",) if differences else ()
    by_tile = frozenset({"codes", "scales"} if scales.shape[0] > 1 else {"codes"})
    return parts.weight(
        (codes.shape[0] * out, codes.shape[1] * into),
        Custom(parts.entries, decode, out, codes.shape[0], by_tile),
        evidence=(f"AQLM, {count(n, 'codebook')} of {bits} bits for groups of {out} × {into}",),
        warnings=(*check_quant_method(parts, "aqlm"), *warnings),
    )


def decode(stored: Stored, _chunk: Chunk) -> Tensor:
    """Return (sum of vectors) · scale of whole groups of rows, (r, cols)."""
    books = stored["codebooks"]
    n, size, out, _ = books.shape
    codes = stored["codes"].long() & size - 1  # (groups down, groups across, n)
    total = books[0][codes[..., 0]].float()  # (groups down, groups across, out, into)
    for number in range(1, n):
        total = total + books[number][codes[..., number]]
    groups = total * stored["scales"].float()
    return groups.transpose(1, 2).reshape(len(codes) * out, -1)


FORMATS = (Format("aqlm", NEEDS, fit),)
