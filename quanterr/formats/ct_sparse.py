"""compressed-tensors sparse formats: the nonzero elements and a mask of their places; all others are zero.

    compressed           f32, bf16, f16, f8_e4m3, i8    sparse-24-bitmask: (rows, cols / 2), two of every four columns
                                                        sparse-bitmask: (n,), row by row
    bitmask              u8        (rows, cols / 8 rounded up), bit j of byte i is column 8 i + j
    row_offsets          i64       sparse-bitmask: (rows,), index in compressed at which a row begins
    shape                i64       (2,) or (2, 1)
    weight_scale         f32, bf16, f16    (rows, blocks) or one, if compressed holds codes
    weight_zero_point    i8        shaped as the scale; optional

    code[r, c] = the next element of compressed where the bit is set, else 0
    weight = code, or (code - zero_point) * scale                    one rounding; as ct_int and fp8_scaled

Reference: vllm-project/compressed-tensors@0.13.0 compressors/sparse_compressors/sparse_24_bitmask.py,
sparse_bitmask.py.
"""

from __future__ import annotations

from functools import cache, partial

from quanterr.errors import CheckpointError
from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.config_checks import read_integers
from quanterr.formats.shared.ct_row_groups import apply_scales, fit_row_blocks
from quanterr.kernel.levels import OF_DTYPE
from quanterr.lazy_torch import Tensor, torch

CODES = frozenset({"F8_E4M3", "I8"})
INTEGERS = frozenset({"I64", "I32"})


def _name_part(name: str) -> tuple[str, ...]:
    return f"{{module}}.{name}", f"{{weight}}.{name}"


SPARSE_24 = {
    "codes": PartSpec(_name_part("compressed"), FLOATS | CODES),
    "mask": PartSpec(_name_part("bitmask"), frozenset({"U8"})),
    "shape": PartSpec(_name_part("shape"), INTEGERS),
    "scale": PartSpec(("{weight}_scale",), FLOATS, optional=True),
    "zero_point": PartSpec(("{weight}_zero_point",), INT8, optional=True),
}
SPARSE = SPARSE_24 | {"row_offsets": PartSpec(_name_part("row_offsets"), frozenset({"I64"}))}


def fit_24(parts: Parts) -> Weight:
    """Return a weight stored as two of every four columns."""
    rows, cols = _read_shape(parts)
    if cols % 4 or parts.codes.shape != (rows, cols // 2):
        raise FormatMismatch(f"{parts.codes} should hold half of each row of a weight of shape {[rows, cols]}")
    return _make_weight(parts, (rows, cols))


def fit(parts: Parts) -> Weight:
    """Return a weight stored as its nonzero elements."""
    rows, cols = _read_shape(parts)
    if len(parts.codes.shape) != 1 or parts["row_offsets"].shape != (rows,):
        raise FormatMismatch(f"{parts.codes} and {parts['row_offsets']} should be 1-D, the second with {rows} elements")
    return _make_weight(parts, (rows, cols))


def _read_shape(parts: Parts) -> tuple[int, int]:
    entry, mask = parts["shape"], parts["mask"]
    shape = read_integers(entry) if entry.n == 2 else []
    if len(shape) != 2 or min(shape) < 1 or mask.shape != (shape[0], -(-shape[1] // 8)):
        raise FormatMismatch(f"{entry} declares {shape}, which does not fit {mask}: one bit per column")
    return shape[0], shape[1]


def _make_weight(parts: Parts, shape: tuple[int, int]) -> Weight:
    scale, are_codes = parts.get("scale"), parts.codes.dtype in CODES
    if are_codes != (scale is not None):
        beside = f"it has a scale {scale}" if scale else "its scale is missing"
        raise FormatMismatch(f"{parts.codes} is stored as {parts.format}, but {beside}")
    blocks = fit_row_blocks(parts, shape) if scale else None
    return parts.weight(
        shape,
        partial(dequantize, parts, shape, blocks),
        block_size=blocks.edges if blocks else None,
        code_bits=8 if are_codes else None,
        levels=OF_DTYPE[parts.codes.dtype] if are_codes else None,
        uniform_bits=8 if parts.codes.dtype == "I8" else None,
        scale=scale,
        evidence=(f"{parts.codes}, {parts['mask']}",),
        warnings=blocks.warnings if blocks else (),
    )


def dequantize(
    parts: Parts, shape: tuple[int, int], blocks: ColumnBlocks | None, chunk: Chunk, workspace: Workspace
) -> Values:
    """Return the stored elements in their places, scaled if they are codes: (r, c).

    Raises:
        CheckpointError: the number of bits set in a row of the mask is not the number of stored elements.
    """
    stored = _scatter(parts, shape, chunk, workspace)
    if blocks is None:
        return Values(stored)
    codes = element_types.decode_codes(stored, parts.codes.dtype)
    return codes._replace(weight=apply_scales(codes.weight, parts, blocks, chunk, workspace))


def _scatter(parts: Parts, shape: tuple[int, int], chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the stored elements and zeros, (r, c): codes as stored, numbers as float32."""
    r, cols = chunk.shape[0], shape[1]
    width = -(-cols // 8)
    packed = workspace.read("mask", parts["mask"], chunk.row * width, (r, width))
    indices = workspace.buffer("indices", (r * width,), torch.int32).copy_(packed.view(-1))
    flags = workspace.buffer("flags", (r * width, 8), torch.int32)
    flags = torch.index_select(_make_bits(workspace.device), 0, indices, out=flags).view(r, 8 * width)
    first, last = _find_bounds(parts, shape, chunk, flags.sum(1), workspace)
    if chunk.shape[1] < cols:
        first += int(flags[:, : chunk.col].sum())
        last = first + int(flags[:, chunk.col : chunk.stop_col].sum())
    elements = workspace.read("elements", parts.codes, first, (last - first,))
    dtype = torch.int8 if parts.codes.dtype in CODES else torch.float32
    choices = workspace.buffer("choices", (1 + last - first,), dtype)
    choices[:1] = 0
    choices[1:].copy_(elements)
    flags = flags[:, chunk.col : chunk.stop_col].reshape(-1)
    places = workspace.buffer("places", (chunk.n,), torch.int32)
    torch.cumsum(flags, 0, dtype=torch.int32, out=places).mul_(flags)
    out = workspace.buffer("scattered", (chunk.n,), dtype)
    return torch.index_select(choices, 0, places, out=out).view(chunk.shape)


def _find_bounds(
    parts: Parts, shape: tuple[int, int], chunk: Chunk, counts: Tensor, workspace: Workspace
) -> tuple[int, int]:
    """Return the index of the first stored element in the chunk's rows, and of the one after the last."""
    codes, (rows, cols), (top, bottom) = parts.codes, shape, (chunk.row, chunk.stop_row)
    if entry := parts.get("row_offsets"):
        offsets = workspace.read_whole("row_offsets", entry)
        begins, after = offsets[top:bottom], int(offsets[bottom]) if bottom < rows else codes.n
        expected = torch.diff(begins, append=begins.new_tensor([after]))
        first, last = int(begins[0]), after
    else:
        expected = torch.full_like(counts, cols // 2)
        first, last = top * cols // 2, bottom * cols // 2
    if not torch.equal(counts, expected) or not 0 <= first <= last <= codes.n:
        row = int((counts != expected).to(torch.uint8).argmax())
        raise CheckpointError(
            f"{codes.file}: {parts['mask']} marks {int(counts[row])} elements in row {top + row}, "
            f"{codes} holds {int(expected[row])}: damaged"
        )
    return first, last


@cache
def _make_bits(device: torch.device) -> Tensor:
    """Return the bits of each byte, low first: (256, 8) int32."""
    return (torch.arange(256)[:, None] >> torch.arange(8) & 1).int().to(device)


FORMATS = (
    Format(
        "ct_sparse_bitmask",
        SPARSE,
        fit,
        summary="the elements that are not zero, and a mask of them; numbers, or codes with a scale",
    ),
    Format(
        "ct_sparse24_bitmask",
        SPARSE_24,
        fit_24,
        summary="two of every four columns, and a mask of them; numbers, or codes with a scale",
    ),
)
