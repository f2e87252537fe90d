"""SpQR: 3-bit codes in tiles of 16 × 16, whose scales are 3-bit codes too, and outliers.

    dense_weights    i64    (16 · tiles,): a word for each row of each tile, tiles row by row; partial tiles are padded
    row_offsets      i32    (rows + 1,) index of each row's first outlier; or (rows / 16 + 1,) of each tile row's first,
                            where outlier n belongs to row n % 16 and zeros pad ("PTCSR")
    col_vals         i32    (outliers,): a column in the low half, a float16 in the high half
    in_perm          i32    (cols / 2,), two u16 per word: the column of the weight that is stored there; or empty

Bits of a word, low first: 3 for the code of the scale, 3 for the zero point, 16 · 3 for codes, and 8, which in two rows
together make a byte of four float16: scale and zero point of the scales, ss and sz, and of the zero points, zs and
zz, stored as ss, zs, sz, zz. In float16, each operation rounded, like the producer's dequantize:

    scale = ss * (scale code - sz)        zero = zs * (zero code - zz)
    stored[r, c] = float16(float32(scale * (code - zero)) + float32(outlier of r, c))
    weight[:, in_perm[c]] = stored[:, c]

Reference: Vahe1994/SpQR@543d10e inference_lib/src/spqr_quant/inference_kernels/spqr_cuda.cpp dequantize_compressed,
inference_lib/src/spqr_quant/inference.py, sparse_util.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.errors import CheckpointError
from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Weight
from quanterr.formats.shared.config_checks import check_permutation, check_quant_method, read_integers
from quanterr.formats.shared.custom import Custom, Stored
from quanterr.lazy_torch import Tensor, torch

TILE, BITS = 16, 3
CODES_AT, RECORD_AT = 2 * BITS, (2 + TILE) * BITS  # bit offsets of the codes, and of a part of ss … zz
CONFIG = {"bits": BITS, "beta1": TILE, "beta2": TILE}
NEEDS = {
    "codes": PartSpec(("{module}.dense_weights",), frozenset({"I64"})),
    "offsets": PartSpec(("{module}.row_offsets",), frozenset({"I32"})),
    "outliers": PartSpec(("{module}.col_vals",), frozenset({"I32"})),
    "order": PartSpec(("{module}.in_perm",), frozenset({"I32"}), optional=True),
}


class SpqrLayout(NamedTuple):
    """The shape of a weight, the tiles per tile row, and whether outliers are interleaved."""

    rows: int
    cols: int
    across: int
    interleaved: bool


def fit(parts: Parts) -> Weight:
    """Return the weight with the original's shape; without one, with the shape that the column order implies."""
    for name, value in CONFIG.items():
        if parts.hints.config.get(name, value) != value:
            raise FormatMismatch(
                f"config.json declares {name} {parts.hints.config[name]}, but only SpQR with {value} is supported"
            )
    codes, offsets = parts["codes"], parts["offsets"]
    order = parts.get("order") if parts.get("order") and parts["order"].n else None
    rows, cols = parts.hints.shape if parts.hints.shape and len(parts.hints.shape) == 2 else _find_shape(parts, order)
    layer = SpqrLayout(rows, cols, -(-cols // TILE), offsets.n != rows + 1)
    tall = -(-rows // TILE)
    if codes.shape != (tall * layer.across * TILE,):
        raise FormatMismatch(f"{codes} should be {[tall * layer.across * TILE]}: tiles of 16 × 16 for {rows} × {cols}")
    if offsets.shape != ((tall + 1,) if layer.interleaved else (rows + 1,)):
        raise FormatMismatch(f"{offsets} should have {rows + 1} or {tall + 1} numbers for {rows} rows")
    _check_offsets(parts)
    if order:
        if order.shape != (cols // 2,) or cols % 2:
            raise FormatMismatch(f"{order} should have half as many numbers as there are columns, {cols}")
        check_permutation(
            order, [half for word in read_integers(order) for half in (word & 0xFFFF, word >> 16 & 0xFFFF)]
        )
    scope = "of tiles" if layer.interleaved else "of rows"
    return parts.weight(
        (rows, cols),
        Custom(parts.entries, partial(decode, parts, layer), TILE, tall, frozenset({"codes"})),
        code_bits=BITS,
        evidence=(f"SpQR, tiles of 16 × 16, {parts['outliers'].n} outliers by offsets {scope}",),
        warnings=check_quant_method(parts, "spqr"),
    )


def _find_shape(parts: Parts, order: object) -> tuple[int, int]:
    """Infer (rows, cols) from the column order, assuming whole tiles."""
    if not order:
        raise FormatMismatch("SpQR does not store the shape of a weight: give an original, or store an in_perm")
    cols = 2 * parts["order"].n
    return parts["codes"].n // -(-cols // TILE), cols


def _check_offsets(parts: Parts) -> None:
    numbers = read_integers(parts["offsets"])
    if numbers[0] != 0 or numbers[-1] != parts["outliers"].n or sorted(numbers) != numbers:
        raise FormatMismatch(
            f"{parts['offsets']} should rise from 0 to {parts['outliers'].n}, the number of {parts['outliers']}"
        )


def decode(parts: Parts, layer: SpqrLayout, stored: Stored, chunk: Chunk) -> Tensor:
    """Return scale · (code - zero) + outliers of whole tiles of rows, (r, cols)."""
    values = _decode_dense(stored["codes"].view(-1, layer.across, TILE))
    values = _add_outliers(parts["outliers"], layer, values, stored, chunk).half().float()
    if len(stored.get("order", ())):
        order = stored["order"].view(torch.int16).long() & 0xFFFF
        values = values.index_select(1, torch.argsort(order))  # where each column of the weight is stored
    return values


def _decode_dense(words: Tensor) -> Tensor:
    """Return the codes' values, float32 (rows, columns), from int64 words, (tile rows, tiles, 16)."""
    pieces = (words >> RECORD_AT).to(torch.uint8).view(*words.shape[:2], -1, 2)  # (tile rows, tiles, 8, 2)
    record = pieces[..., 0] | pieces[..., 1]
    ss, zs, sz, zz = record.view(torch.float16).float().unsqueeze(3).unbind(2)
    scale = ss.mul((words & 7).sub(sz).half()).half()
    zero = zs.mul((words >> BITS & 7).sub(zz).half()).half()
    shifts = CODES_AT + BITS * torch.arange(TILE, device=words.device)
    codes = words.unsqueeze(-1) >> shifts & 7  # (tile rows, tiles, rows of a tile, columns of a tile)
    values = (codes.float() - zero.unsqueeze(-1).float()).half().float() * scale.unsqueeze(-1).float()
    return values.half().float().transpose(1, 2).reshape(len(words) * TILE, -1)


def _add_outliers(entry: Entry, layer: SpqrLayout, values: Tensor, stored: Stored, chunk: Chunk) -> Tensor:
    """Return a chunk's values, (r, columns), with its outliers added."""
    first, stop = (row // TILE if layer.interleaved else min(row, layer.rows) for row in (chunk.row, chunk.stop_row))
    bounds = stored["offsets"][first : stop + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    outliers = stored["outliers"][begin:end]
    rows = torch.repeat_interleave(bounds.diff().long())
    if layer.interleaved:
        rows = rows * TILE + torch.arange(begin, end, device=rows.device) % TILE
    cols = outliers.long() & 0xFFFF
    if begin < end and int(cols.max()) >= layer.cols:
        raise CheckpointError(f"{entry.file}: {entry} has an outlier in column {int(cols.max())}, beyond the last")
    numbers = (outliers >> 16).to(torch.int16).view(torch.float16).float()
    return values.view(-1).index_add(0, rows * values.shape[1] + cols, numbers).view(values.shape)


FORMATS = (Format("spqr", NEEDS, fit),)
