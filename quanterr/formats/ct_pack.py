"""compressed-tensors pack-quantized: integers of 1 to 8 bits, packed along the rows.

    weight_packed        i32               (rows, words), or (experts, rows, words)
    weight_scale         f32, bf16, f16    (rows, blocks), or (experts, rows, blocks), or one
    weight_zero_point    i32               (words of rows, blocks), or (experts, …); optional. Packed down columns
                         i8                one, where the scale is one
    weight_shape         i64, i32          (2,) or (3,): the shape of the weight
    weight_g_idx         i32               (cols,), optional: shared/column_groups.py

    weight[r, c] = (code[r, c] - zero_point[r, block of c]) * scale[r, block of c]
                                                          one rounding; exact for 16-bit scales

Codes and packed zero points are unsigned, 2^(b-1) is zero. Since 0.18 they are packed dense, before as many
into each word as fit whole (shared/bit_packing.py): for 3, 5 and 6 bits the width of the tensor decides
which, and how many bits; 7 bits of old files are as wide as 8 bits, which config.json distinguishes (num_bits),
or else the original. Where columns are fewer than 64 other widths may coincide too.

Reference: vllm-project/compressed-tensors@ac8e2ba8 compressors/pack_quantized/base.py, helpers.py;
compressed-tensors@0.13.0 compressors/quantized_compressors/pack_quantized.py for the old packing and weight_g_idx.
"""

from functools import partial

import torch
from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.formats.base import (
    Chunk,
    Decoder,
    Dequantize,
    Element,
    Format,
    FormatMismatch,
    Native,
    Part,
    Parts,
    Values,
    Weight,
    Workspace,
)
from quanterr.formats.shared import bit_stream
from quanterr.formats.shared.bit_packing import WORD, Packing, cropped, unpack_columns, unpack_rows
from quanterr.formats.shared.column_groups import Blocks, fit_blocks
from quanterr.formats.shared.ct_config import configured
from quanterr.formats.shared.ct_row_groups import of_rows
from quanterr.tensors.levels import uniform
from quanterr.tensors.workspace import TORCH_DTYPES
from quanterr.util.strict_json import JsonFields
from quanterr.util.text import parse_digits

NEEDS = {
    "codes": Part(("{weight}_packed",), frozenset({"I32"})),
    "scale": Part(("{weight}_scale",), frozenset({"F32", "BF16", "F16"})),
    "zero_point": Part(("{weight}_zero_point",), frozenset({"I32", "I8"}), optional=True),
    "shape": Part(("{weight}_shape",), frozenset({"I64", "I32"})),
    "order": Part(("{weight}_g_idx",), frozenset({"I32"}), optional=True),
}
PACKINGS = tuple(Packing("dense", bits) for bits in (4, 8, 2, 3, 5, 6, 7, 1))  # the likeliest first
FLOOR = tuple(Packing("floor", bits) for bits in (3, 5, 6, 7))
DENSE_SINCE = (0, 18)


def fit(parts: Parts) -> Weight:
    """The weight by the packing that configuration and widths give; others of that width as alternatives."""
    shape = _stored_shape(parts["shape"])
    codes, scale = parts.codes, parts["scale"]
    if len(shape) not in (2, 3) or min(shape) < 1 or codes.shape[:-1] != shape[:-1]:
        raise FormatMismatch(f"{parts['shape']} says {list(shape)}, but the codes are {codes}")
    if scale.n != 1 and scale.shape[:-1] != shape[:-1]:
        raise FormatMismatch(
            f"its scale {scale} should have one or more for each row of a weight of shape {list(shape)}"
        )
    order = parts.get("order")
    if order is not None and order.shape != shape[1:]:
        raise FormatMismatch(f"{order} should have one for each column of a weight of shape {list(shape)}")
    blocks = fit_blocks(scale.shape[-1] if scale.n > 1 else 1, shape[-1], configured(parts, "group_size"), order)
    packings = _packings(parts, shape, blocks.n)
    declared = configured(parts, "num_bits")
    warnings = blocks.warnings
    if declared is not None and packings[0].bits != declared:
        warnings += (f"config.json declares num_bits {declared}, the width of {codes} gives {packings[0].bits}",)
    alternatives = [
        parts.weight(
            shape,
            _native(parts, packing, blocks),
            block_size=blocks.edges,
            code_bits=packing.bits,
            uniform_bits=packing.bits,
            levels=uniform(packing.bits),
            scale=scale,
            evidence=(f"{packing.bits}-bit codes, {packing.name}, in {codes}, scale {scale}",),
            warnings=warnings,
        )
        for packing in packings
    ]
    return alternatives[0].or_else(alternatives[1:])


def _stored_shape(entry: Entry) -> tuple[int, ...]:
    if entry.n not in (2, 3):
        return ()
    return tuple(torch.frombuffer(bytearray(entry.read()), dtype=TORCH_DTYPES[entry.dtype]).tolist())


def _packings(parts: Parts, shape: tuple[int, ...], n_blocks: int) -> list[Packing]:
    """The packings that give these widths, the likeliest first.

    Raises:
        FormatMismatch: none does.
    """
    codes, zero_point = parts.codes, parts.get("zero_point")
    dense_first = _version(parts.hints.config) >= DENSE_SINCE
    fitting = [
        packing
        for packing in (*PACKINGS, *FLOOR)
        if packing.words(shape[-1]) == codes.shape[-1] and _fits(zero_point, packing, shape, n_blocks)
    ]
    if not fitting:
        beside = f" with {zero_point}" if zero_point else ""
        raise FormatMismatch(f"{codes}{beside} fits no packing of 1 to 8 bits of a weight of shape {list(shape)}")
    declared = configured(parts, "num_bits")
    fitting.sort(
        key=lambda packing: (packing.bits != declared, packing.bits == declared and (packing in FLOOR) == dense_first)
    )
    return [packing for packing in fitting if packing.bits == declared] or fitting


def _fits(entry: Entry | None, packing: Packing, shape: tuple[int, ...], n_blocks: int) -> bool:
    """Whether zero points are there as that packing has them, or none are."""
    if entry is None:
        return True
    if entry.dtype == "I8":
        return entry.n == n_blocks == 1
    return entry.shape == (*shape[:-2], packing.words(shape[-2]), n_blocks)


def _version(config: JsonFields) -> tuple[int, ...]:
    """Of the library that wrote the file; where it does not say, a new one."""
    version = config.get("version")
    words = [parse_digits(word) for word in version.split(".")[:2]] if isinstance(version, str) else []
    numbers = tuple(word for word in words if word is not None)
    return numbers if numbers and len(numbers) == len(words) else DENSE_SINCE


def dequantize(parts: Parts, packing: Packing, blocks: Blocks, chunk: Chunk, workspace: Workspace) -> Values:
    """(code - zero point) · scale, (r, c)."""
    codes = _codes(parts.codes, packing, chunk, workspace)
    zero_point: Tensor | float = 1 << packing.bits - 1
    if parts.get("zero_point"):
        zero_point = _zero_point(parts, packing, chunk, workspace)
    scale = of_rows("scale", parts["scale"], blocks, chunk, workspace)
    return Values(blocks.dequantize(codes, zero_point, scale, chunk, workspace))


def _native(parts: Parts, packing: Packing, blocks: Blocks) -> Dequantize:
    """:func:`dequantize`, with the same as data where bytes hold whole codes of columns in order."""
    plain, zero_point = partial(dequantize, parts, packing, blocks), parts.get("zero_point")
    table = bit_stream.byte_table(packing.bits, 0 if zero_point else 1 << packing.bits - 1)
    if table is None or blocks.order:
        return plain
    decoder = Decoder(
        parts.codes,
        parts.codes.shape[-1] * WORD // packing.bits,
        Element.TABLE,
        table,
        scale=blocks.within(partial(of_rows, "scale", parts["scale"], blocks)),
        zero=blocks.within(partial(_zero_point, parts, packing)) if zero_point else None,
        group=blocks.group,
    )
    return Native(plain, decoder)


def _codes(entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Codes of a chunk as float32, (r, c)."""
    run, width = packing.run(WORD), entry.shape[-1]
    first, last = chunk.col // len(run.codes), -(-chunk.stop_col // len(run.codes))
    left, right = first * run.containers, min(last * run.containers, width)
    words = workspace.read("words", entry, chunk.row * width + left, (chunk.shape[0], right - left))
    start = first * len(run.codes)
    return cropped(unpack_columns(words, packing, workspace), chunk.col - start, chunk.stop_col - start, workspace)


def _zero_point(parts: Parts, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Zero points of the rows of a chunk, or the one, float32, (r or 1, blocks)."""
    entry = parts["zero_point"]
    if entry.dtype == "I8":
        return workspace.whole("zeros", entry).view(1, 1).float() + (1 << packing.bits - 1)
    return _zero_points(parts.codes, entry, packing, chunk, workspace)


def _zero_points(codes: Entry, entry: Entry, packing: Packing, chunk: Chunk, workspace: Workspace) -> Tensor:
    """Packed zero points of the rows of a chunk as float32, (r, blocks)."""
    rows, (words, n_blocks), run = codes.shape[-2], entry.shape[-2:], packing.run(WORD)
    pieces = []
    for expert in range(chunk.row // rows, (chunk.stop_row - 1) // rows + 1):
        row, stop_row = max(chunk.row - expert * rows, 0), min(chunk.stop_row - expert * rows, rows)
        first, last = row // len(run.codes), -(-stop_row // len(run.codes))
        stored = workspace.held("zeros", entry, expert * words * n_blocks, (words, n_blocks))
        found = unpack_rows(stored[first * run.containers : last * run.containers], packing, workspace, "zero_points")
        pieces.append(found[row - first * len(run.codes) : stop_row - first * len(run.codes)].clone())
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


FORMATS = (Format("ct_pack", NEEDS, fit, usual_db=(6, 42)),)
