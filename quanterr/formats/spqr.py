"""SpQR: 3-bit codes in tiles of 16 × 16, whose scales are 3-bit codes too, and outliers.

    dense_weights    i64    (16 · tiles,): a word for each row of each tile, tiles row by row; partial tiles are padded
    row_offsets      i32    (rows + 1,) index of each row's first outlier; or (rows / 16 + 1,) of each tile row's first,
                            where outlier n belongs to row n % 16 and zeros pad ("PTCSR")
    col_vals         i32    (outliers,): a column in the low half, a float16 in the high half
    in_perm          i32    (cols / 2,), two u16 per word: the column of the weight that is stored there; or empty

Bits of a word, low first: 3 for the code of the scale, 3 for the zero point, 16 · 3 for codes, and 8, which in two rows
together make a byte of four float16: scale and zero point of the scales, ss and sz, and of the zero points, zs and
zz, stored as ss, zs, sz, zz. In float16, each operation rounded, like the producer's own dequantize:

    scale = ss * (scale code - sz)        zero = zs * (zero code - zz)
    stored[r, c] = float16(float32(scale * (code - zero)) + float32(outlier of r, c))
    weight[:, in_perm[c]] = stored[:, c]

Reference: Vahe1994/SpQR@543d10e inference_lib/src/spqr_quant/inference_kernels/spqr_cuda.cpp dequantize_compressed,
inference_lib/src/spqr_quant/inference.py, sparse_util.py.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

from quanterr.errors import CheckpointError
from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import code_tiles
from quanterr.formats.shared.code_tiles import TileLayout
from quanterr.formats.shared.config_checks import check_permutation, check_quant_method, read_integers
from quanterr.formats.shared.padding import crop
from quanterr.formats.shared.scale_grid import apply_by_block, multiply
from quanterr.lazy_torch import Tensor, torch

TILE, BITS, WORD = 16, 3, 32
CODES_AT, RECORD_AT = 2 * BITS, (2 + TILE) * BITS  # bit offsets of the codes, and of a piece of ss … zz
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
    kind = "of tiles" if layer.interleaved else "of rows"
    return parts.weight(
        (rows, cols),
        partial(dequantize, parts, layer),
        code_bits=BITS,
        evidence=(f"SpQR, tiles of 16 × 16, {parts['outliers'].n} outliers by offsets {kind}",),
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


def dequantize(parts: Parts, layer: SpqrLayout, chunk: Chunk, workspace: Workspace) -> Values:
    """Return scale · (code - zero) + outliers, (r, c)."""
    first, stop = chunk.row // TILE, -(-chunk.stop_row // TILE)
    words = workspace.read("codes", parts["codes"], first * layer.across * TILE, (stop - first, layer.across, TILE))
    stored = _decode_dense(words, workspace)
    _add_outliers(parts, layer, stored, first, stop, workspace)
    rows = _round(stored[chunk.row - first * TILE : chunk.stop_row - first * TILE], workspace)
    if (order := parts.get("order")) and order.n:
        values = workspace.output((len(rows), layer.cols))
        inverse = workspace.cache(  # the place where each column of the weight is stored
            "inverse",
            parts["order"],
            0,
            lambda: torch.argsort(workspace.read_whole("order", parts["order"]).view(torch.int16).long() & 0xFFFF),
        )
        rows = torch.index_select(rows, 1, inverse, out=values)
    return Values(crop(rows, chunk, workspace))


def _round(values: Tensor, workspace: Workspace) -> Tensor:
    """Round float32 to float16 precision in place, as torch takes several times as long to compute in float16."""
    return values.copy_(workspace.buffer("rounded", tuple(values.shape), torch.float16).copy_(values))


def _decode_dense(words: Tensor, workspace: Workspace) -> Tensor:
    """Return the codes' values, float32 (rows, columns), from int64 words, (tile rows, tiles, 16)."""
    pieces = (words >> RECORD_AT).to(torch.uint8).view(*words.shape[:2], -1, 2)  # (tile rows, tiles, 8, 2)
    record = pieces[..., 0] | pieces[..., 1]
    ss, zs, sz, zz = record.view(torch.float16).float().unsqueeze(3).unbind(2)
    low = words.view(torch.int32)[..., ::2]  # (tile rows, tiles, 16)
    scale = ss.mul((low & 7).sub(sz).half()).half()
    zero = zs.mul((low >> BITS & 7).sub(zz).half()).half()
    layout, table = _lay_out_codes(words.device), torch.arange(1 << BITS, dtype=torch.float32, device=words.device)
    values = code_tiles.look_up(words.view(torch.int32), layout, table, workspace)
    zero, scale = (of_tiles.transpose(1, 2).reshape(len(values), -1).float() for of_tiles in (zero, scale))
    _round(apply_by_block(torch.Tensor.sub_, values, zero, 0, TILE), workspace)
    return _round(multiply(values, scale, 0, TILE), workspace)


@cache
def _lay_out_codes(device: torch.device) -> TileLayout:
    """Return the places of a tile's codes: a row is two words of 32 bits."""
    row, start = torch.arange(TILE).unsqueeze(1), CODES_AT + BITS * torch.arange(TILE)
    low = 2 * row + start // WORD
    codes = torch.stack([low, torch.clamp(low + 1, max=2 * TILE - 1), (start % WORD).expand_as(low)], 2)
    return TileLayout(TILE, TILE, codes.view(-1, 3).to(device, torch.int32))


def _add_outliers(parts: Parts, layer: SpqrLayout, stored: Tensor, first: int, stop: int, workspace: Workspace) -> None:
    """Add the outliers of tile rows ``first:stop`` to ``stored``."""
    offsets = workspace.read_whole("offsets", parts["offsets"])
    bounds = offsets[first : stop + 1] if layer.interleaved else offsets[first * TILE : stop * TILE + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    if begin == end:
        return
    found = workspace.read("outliers", parts["outliers"], begin, (end - begin,))
    rows = torch.repeat_interleave((bounds[1:] - bounds[:-1]).long())
    if layer.interleaved:
        rows = rows * TILE + torch.arange(begin, end, device=rows.device) % TILE
    cols = found.long() & 0xFFFF
    if int(cols.max()) >= layer.cols:
        raise CheckpointError(
            f"{parts['outliers'].file}: {parts['outliers']} has an outlier in column {int(cols.max())}, beyond the last"
        )
    numbers = (found >> 16).to(torch.int16).view(torch.float16).float()
    stored.view(-1).index_add_(0, rows * stored.shape[1] + cols, numbers)


FORMATS = (Format("spqr", NEEDS, fit),)
