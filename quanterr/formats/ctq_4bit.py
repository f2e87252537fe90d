"""Flat four-bit codes of convert_to_quant's experiments of December 2025, which it labels bnb_nf4, bnb_fp4, bnb_af4.

    weight    u8     (n / 2,), two codes per byte, the first in the low nibble: the weight's n elements in C order
    absmax    f32    (n / 64,), one per 64 elements, across the ends of rows

    weight[i] = table[code[i]] * absmax[i // 64]                                       rounded

The label names the table (format bnb_nf4, bnb_fp4 or bnb_af4) and the block (group_size, default 64). The shape is not
stored; the original gives it. bitsandbytes itself puts the first code in the high nibble.

Reference: silveroxides/convert_to_quant@1.3.4, branches 3d-blockwise and nf4-optimize, dequantize_4bit.
"""

from __future__ import annotations

from functools import partial
from math import prod

from quanterr.formats.base import (
    Decoder,
    Format,
    FormatMismatch,
    Parts,
    PartSpec,
    Weight,
)
from quanterr.formats.shared.comfy_labels import check_labels
from quanterr.formats.shared.flat_blocks import read_flat_codes
from quanterr.formats.shared.padding import read_labelled_shape
from quanterr.kernel.grid import Grid, Run
from quanterr.kernel.levels import nibbles
from quanterr.tensors.chunks import as_matrix

BLOCK = 64
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
FP4 = tuple(n / 12 for n in (0.0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3))
AF4 = (
    1.0,
    0.72424863,
    0.55496234,
    0.42563882,
    0.31675666,
    0.21961274,
    0.12934483,
    0.04273164,
    0.0,
    -0.04934812,
    -0.14982478,
    -0.25607552,
    -0.3736951,
    -0.51243739,
    -0.69441008,
    -1.0,
)
TABLES = {"nf4": NF4, "fp4": FP4, "af4": AF4}
LABELS = frozenset(f"bnb_{name}" for name in TABLES)
NEEDS = {
    "codes": PartSpec(("{weight}",), frozenset({"U8"})),
    "absmax": PartSpec(("{module}.absmax",), frozenset({"F32"})),
}


def fit(table: str, parts: Parts) -> Weight | None:
    """Return the weight if its label names this table."""
    comfy_format, warnings = check_labels(parts, LABELS)
    codes, absmax = parts.codes, parts["absmax"]
    if comfy_format is None:
        raise FormatMismatch(
            f"4-bit codes {codes} with {absmax}, but no label names their table: {', '.join(sorted(LABELS))}"
        )
    if comfy_format != f"bnb_{table}":
        return None
    shape = parts.hints.shape or read_labelled_shape(parts)
    if shape is None:
        raise FormatMismatch(f"{codes} is flat, and its shape is not stored: it can only be read with the original")
    block = parts.hints.labels[0].number("group_size") or BLOCK
    n = prod(shape)
    if codes.shape != (-(-n // 2),) or absmax.shape != (-(-n // block),):
        raise FormatMismatch(
            f"a weight of {list(shape)} needs {-(-n // 2)} bytes and {-(-n // block)} absmax (one for {block} "
            f"elements), found {codes} and {absmax}"
        )
    return parts.weight(
        shape,
        _read(parts, table, as_matrix(shape)[1], block),
        code_bits=4,
        block_size=None if as_matrix(shape)[1] % block else (1, block),
        levels=nibbles(TABLES[table]),
        evidence=(f"{parts.hints.labels[0]}; flat codes in blocks of {block}",),
        warnings=warnings,
        comfy_format=comfy_format,
    )


def _read(parts: Parts, table: str, cols: int, block: int) -> Decoder:
    """Return the decoder of the weight: table[code] · absmax."""
    codes, absmax, levels = parts.codes, parts["absmax"], TABLES[table]
    if cols % block == 0:
        return Decoder(codes, cols, levels=levels, scale=Grid(absmax, cols // block, block), group=block)
    read = partial(read_flat_codes, codes, cols, False)
    return Decoder(codes, cols, levels=levels, scale=Run(absmax, cols, block), read=read)


FORMATS = tuple(
    Format(
        f"ctq_{table}",
        NEEDS,
        partial(fit, table),
        summary=f"flat {table.upper()} codes with an absmax per 64 elements (convert_to_quant's bnb_{table})",
        usual_db=usual_db,
        corrects_biases=True,
    )
    for table, usual_db in (("nf4", (16, 17)), ("fp4", (12, 14)), ("af4", None))
)
