"""Codes that were cast to plain floats, with or without their scale.

    weight[r, c] = number[r, c]                                 as programs load it, which know nothing of the scale
    weight[r, c] = number[r, c] * float32(scale of r, c)        what was meant

A program that casts every tensor of a quantized checkpoint to BF16 writes such numbers. Each is exactly an FP8 number,
as one of 16 numbers in BF16 is by chance, or an integer of 8 bits.
"""

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats.base import Parts, Weight
from quanterr.formats.shared.element_types import read_one_by_one
from quanterr.formats.shared.scale_grid import collect_hints, fit_grid, read_grid
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import find_dtype

SAMPLE_ELEMENTS = 1 << 12  # number of elements that are read
MIN_DISTINCT_CODES = 12  # fewer distinct values also occur in ternary weights and in constants
MIN_CODE, MAX_CODE = -128, 255  # smallest signed and largest unsigned code
MAX_INT4_CODES = 16  # four bits have 16 values


def describe_codes(values: Tensor) -> str | None:
    """Return what codes all ``values`` are, such as ``FP8 E4M3``; None if they are ordinary numbers."""
    distinct = torch.unique(values[values.isfinite()].float())
    if len(distinct) < MIN_DISTINCT_CODES:
        return None
    if torch.equal(distinct, distinct.round()) and distinct[0] >= MIN_CODE and distinct[-1] <= MAX_CODE:
        return "INT4" if len(distinct) <= MAX_INT4_CODES else "INT8"
    kinds = {torch.float8_e4m3fn: "FP8 E4M3", torch.float8_e5m2: "FP8 E5M2"}
    return next(
        (description for dtype, description in kinds.items() if torch.equal(distinct.to(dtype).float(), distinct)), None
    )


def read_beside_scale(codes: Entry, scale: Entry, parts: Parts) -> Weight | None:
    """Return plain numbers that are codes, with codes times scale as an alternative; None if they are no codes."""
    size = min(codes.n, SAMPLE_ELEMENTS) * codes.nbytes // max(codes.n, 1)
    if len(codes.shape) < 2 or not size:
        return None
    stored = torch.frombuffer(bytearray(codes.file.read(codes.offset, size)), dtype=find_dtype(codes.dtype))
    description = describe_codes(stored)
    if description is None:
        return None
    parts = replace(parts, entries={"codes": codes, "scale": scale})
    try:
        grid = fit_grid(scale, codes.shape, collect_hints(parts))
    except FormatMismatch:
        return None
    cast = f"{description} codes that were cast to {codes.dtype}"
    doubt = f"{cast} stand beside their scale, which loaders do not expect: they take the codes for weights"
    as_stored, with_scale = (
        parts.weight(
            codes.shape,
            dequantize,
            encoding="floats",
            evidence=(f"{cast}, {words}",),
            warnings=(doubt,),
            prescribed=True,
            format="dense",
        )
        for dequantize, words in (
            (read_one_by_one(parts), "without their scale"),
            (read_grid(parts, grid), "times their scale"),
        )
    )
    return as_stored.with_alternatives([with_scale])
