"""Integers of Gemma's quantization-aware training: 2, 4 or 8 bits, a scale per row; embeddings too.

    weight                 u8     (rows, cols / 4) of 2 bits, or (rows, cols / 2) of 4 bits, low bits first; rounded up
    weight_scale           f32    (rows, 1)
    embedding_quantized    u8     as weight, for an embedding; or i8 (rows, cols)
    embedding_scale        f32    (rows, 1), or (rows, n) for n blocks of columns

    weight[r, c] = float32(code[r, c] - 2^(bits - 1)) * scale[r]; i8 is not shifted          rounded

Weights of 8 bits are read as int8_row. The number of columns in the original gives the bits; without an original
config.json must: num_bits, and module_quant_configs for the modules that match.

Reference: huggingface/transformers@5.23.0 src/transformers/integrations/gemma_quant.py.
"""

from quanterr.formats.base import (
    WEIGHT_SUFFIX,
    Decoder,
    ElementType,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
)
from quanterr.formats.shared import element_types
from quanterr.formats.shared.config_checks import check_quant_method, matches
from quanterr.kernel.grid import Grid
from quanterr.kernel.levels import INT8, uniform

FLOAT = frozenset({"F32"})
NEEDS = {"codes": PartSpec(("{weight}",), frozenset({"U8"})), "scale": PartSpec(("{weight}_scale",), FLOAT)}
EMBEDDING_NEEDS = {
    "codes": PartSpec(("{module}.embedding_quantized",), frozenset({"U8", "I8"})),
    "scale": PartSpec(("{module}.embedding_scale",), FLOAT),
}


def fit(parts: Parts) -> Weight | None:
    """Return the weight if there is a scale for each stored row."""
    codes, scale = parts["codes"], parts["scale"]
    if len(codes.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != codes.shape[0]:
        return None
    if scale.shape[1] != 1 and parts.format == "gemma_int":
        return None
    rows, stored = codes.shape
    declared = _read_declared_bits(parts)
    shape = parts.hints.shape or (rows, stored if codes.dtype == "I8" else stored * 8 // (declared or 8))
    if codes.dtype == "I8":
        n_bits = 8 if shape[-1] == stored else None
    else:
        n_bits = next((n for n in (2 if declared == 2 else 4, 4, 2) if -(-shape[-1] * n // 8) == stored), None)
    if n_bits is None or len(shape) != 2 or shape[0] != rows or shape[1] % scale.shape[1]:
        context = "and config.json does not declare the bits"
        if parts.hints.shape:
            context = f"for {list(shape)}"
        elif declared is not None:
            context = f"though config.json declares {declared} bits"
        raise FormatMismatch(f"{codes} with {scale}: neither 2-, 4- nor 8-bit codes {context}")
    warning = f"config.json declares num_bits {declared}, but the codes have {n_bits}"
    return parts.weight(
        (rows, shape[1]),
        _read(parts, n_bits, shape[1]),
        block_size=(1, shape[1] // scale.shape[1]) if scale.shape[1] > 1 else None,
        levels=INT8 if n_bits == 8 else uniform(n_bits),
        scale=scale,
        evidence=(f"codes {codes.dtype} of {n_bits} bits, scale {scale}",),
        warnings=(
            *check_quant_method(parts, parts.format, "gemma"),
            *((warning,) if declared not in (None, n_bits) else ()),
        ),
    )


def _read_declared_bits(parts: Parts) -> int | None:
    """Return the bits that config.json declares for the module: by the first matching pattern, or for all modules."""
    declared = parts.hints.config.get("num_bits")
    patterns = parts.hints.config.get("module_quant_configs")
    module = parts.name.removesuffix(WEIGHT_SUFFIX)
    for pattern, options in patterns.items() if isinstance(patterns, dict) else ():
        if isinstance(options, dict) and matches(pattern, module):
            declared = options.get("num_bits", declared)
            break
    return declared if isinstance(declared, int) and declared in (2, 4, 8) else None


def _read(parts: Parts, n_bits: int, cols: int) -> Decoder:
    """Return the decoder of the weight: (code - 2^(bits - 1)) · scale."""
    across = parts["scale"].shape[1]
    is_byte = n_bits == 8
    return Decoder(
        parts["codes"],
        parts["codes"].shape[1] * 8 // n_bits,
        ElementType.I8 if is_byte else None,
        () if is_byte else element_types.list_integers(n_bits, 1 << n_bits - 1),
        Grid(parts["scale"], across, cols // across),
        group=cols // across if across > 1 else 0,
        ends=element_types.ELEMENTS["I8"][1] if is_byte else (),
    )


FORMATS = (
    Format("gemma_int", NEEDS, fit, summary="integers of 2 or 4 bits, a scale per row (Gemma)", usual_db=(3, 22)),
    Format(
        "gemma_embedding",
        EMBEDDING_NEEDS,
        fit,
        summary="integers of 2, 4 or 8 bits of an embedding, a scale per row (Gemma)",
        usual_db=(3, 43),
    ),
)
