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

from functools import partial

from quanterr.errors import CheckpointError
from quanterr.formats.base import Chunk, Decoder, Format, FormatMismatch, Parts, PartSpec, Weight, Workspace
from quanterr.formats.shared import element_types
from quanterr.formats.shared.column_groups import ColumnBlocks
from quanterr.formats.shared.comfy_labels import FLOATS, INT8
from quanterr.formats.shared.config_checks import read_integers
from quanterr.formats.shared.ct_row_groups import fit_row_blocks
from quanterr.kernel.levels import OF_DTYPE
from quanterr.kernel.packing import CodePacking
from quanterr.lazy_torch import Tensor, torch

CODES = frozenset({"F8_E4M3", "I8"})
LEVELS = {"F8_E4M3": element_types.E4M3, "I8": element_types.INT8}
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
        _read(parts, shape, blocks),
        block_size=blocks.edges if blocks else None,
        code_bits=8 if are_codes else None,
        levels=OF_DTYPE[parts.codes.dtype] if are_codes else None,
        scale=scale,
        evidence=(f"{parts.codes}, {parts['mask']}",),
        warnings=blocks.warnings if blocks else (),
    )


def _read(parts: Parts, shape: tuple[int, int], blocks: ColumnBlocks | None) -> Decoder:
    """Return the decoder of the weight: elements in their places, or (code - zero point) · scale."""
    codes, read = parts.codes, partial(_scatter, parts, shape)
    if blocks is None:
        return Decoder(codes, shape[1], read=read)
    zero_point = parts.get("zero_point")
    return Decoder(
        codes,
        shape[1],
        levels=LEVELS[codes.dtype],
        scale=blocks.grid(parts["scale"]),
        zero=blocks.grid(zero_point, "zero_point") if zero_point else None,
        group=blocks.group,
        ends=element_types.ELEMENTS[codes.dtype][1],
        read=read,
    )


def _scatter(parts: Parts, shape: tuple[int, int], chunk: Chunk, workspace: Workspace) -> Tensor:
    """Return the stored elements and zeros, (r, c): codes as uint8, numbers as float32.

    Raises:
        CheckpointError: the number of bits set in a row of the mask is not the number of stored elements.
    """
    codes, cols, r = parts.codes, shape[1], chunk.shape[0]
    width = -(-cols // 8)
    packed = workspace.read("mask", parts["mask"], chunk.row * width, (r, width))
    flags = CodePacking("dense", 1).unpack(packed, 0, 8 * width).bool()
    if entry := parts.get("row_offsets"):
        offsets = workspace.read_whole("row_offsets", entry)
        begins = torch.cat([offsets, offsets.new_tensor([codes.n])])[chunk.row : chunk.stop_row + 1]
    else:
        begins = torch.arange(chunk.row, chunk.stop_row + 1, device=flags.device) * (cols // 2)
    _check_counts(parts, chunk.row, flags.sum(1), begins)
    first, last = int(begins[0]), int(begins[-1])
    stored = workspace.read("elements", codes, first, (last - first,))
    elements = stored.view(torch.uint8) if codes.dtype in CODES else stored.float()
    dense = elements.new_zeros(flags.shape)
    dense[flags] = elements
    return dense[:, chunk.col : chunk.stop_col]


def _check_counts(parts: Parts, row: int, counts: Tensor, begins: Tensor) -> None:
    """Check that the mask marks as many elements in each row, ``counts``, as are stored between its ``begins``."""
    codes, expected = parts.codes, begins.diff()
    if torch.equal(counts, expected) and 0 <= int(begins[0]) <= int(begins[-1]) <= codes.n:
        return
    wrong = int((counts != expected).to(torch.uint8).argmax())
    raise CheckpointError(
        f"{codes.file}: {parts['mask']} marks {int(counts[wrong])} elements in row {row + wrong}, "
        f"{codes} holds {int(expected[wrong])}: damaged"
    )


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
