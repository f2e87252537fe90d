"""EXL3: trellis codes in tiles of 16 × 16, rotated on both sides by Hadamard matrices of 128 points.

    trellis    i16    (cols / 16, rows / 16, 16 · bits), bits from 1 to 8
    suh        f16    (cols,): factors of the columns; or su i16 (cols / 16,), signs: 16 a word, low bit first, 1 is -1
    svh        f16    (rows,): factors of the rows; or sv i16 (rows / 16,)
    mcg, mul1  i32    one: the multiplier of the codebook; without either the codebook is "3inst"; optional

A tile is a circular string of 256 · bits bits: its words, taken in pairs as 32-bit integers, little-endian, the high
bit first. Code t is the 16 bits that end with bit (t + 1) · bits. For a code x, in 32-bit arithmetic:

    3inst, mcg    y = x · 89226354 + 64248484, or x · 0xCBAC1FED; z = (y & 0x8FFF8FFF) ^ 0x3B603B60
                  value = float16(low half of z) + float16(high half of z)
    mul1          y = x · 0x83DCD12D; s = the sum of its four bytes
                  value = (1024 + s) · float16(0x1EEE) + float16(0xC931)

exact in float32 (the CUDA kernels round the sum to float16). Code t = 8 · lane + i is in column
2 · (lane % 4) + i % 2 + 8 · (i // 2 % 2) and row lane // 4 + 8 · (i // 4) of its tile.

    weight = diag(svh) · (H · ((values · H) · diag(suh)))    H = float32(1 / sqrt(128)) · Sylvester in blocks,
                                                             values (rows, cols); each operation rounded

Products are in float32, as in the reference: their last bits depend on the order in which a library adds 128 numbers.
The compiled kernel adds them from the first to the last, with one rounding for a product and its sum.
Rows and columns are padded to multiples of 128. Blocks of 128 rows are dequantized and kept for the chunks that begin
or end in them. The whole trellis stays in memory, because the tiles of one row are scattered.

Reference: turboderp-org/exllamav3@4f8ad012 exllamav3/exllamav3_ext/quant/codebook.cuh, modules/quant/exl3.py;
ModelCloud/GPTQModel@f4c327a1 gptqmodel/nn_modules/exllamav3_torch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from math import sqrt

from quanterr.checkpoints import Entry
from quanterr.formats.base import Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import code_tiles, hadamard
from quanterr.formats.shared.code_tiles import Generator, TileLayout
from quanterr.formats.shared.config_checks import check_quant_method, read_integers
from quanterr.formats.shared.padding import fit_padded
from quanterr.kernel.library import choose_kernel
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.products import multiply

BLOCK, TILE = 128, 16
COLUMNS_AT_ONCE = 1024  # columns dequantized at a time, so that the buffers stay in the cache
UNIT = 1 / sqrt(BLOCK)
FACTOR, BIAS = 1774 / 2.0**18, -10.3828125  # float16 values 0x1EEE and 0xC931 of mul1
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
GENERATORS = {"3inst": Generator(89226354, 64248484), "mcg": Generator(MULTIPLIERS["mcg"], 0)}
NEEDS = {
    "trellis": PartSpec(("{module}.trellis",), frozenset({"I16"})),
    "cols": PartSpec(("{module}.suh", "{module}.su"), frozenset({"F16", "I16"})),
    "rows": PartSpec(("{module}.svh", "{module}.sv"), frozenset({"F16", "I16"})),
    "mcg": PartSpec(("{module}.mcg",), frozenset({"I32", "U32"}), optional=True),
    "mul1": PartSpec(("{module}.mul1",), frozenset({"I32", "U32"}), optional=True),
}


@dataclass(frozen=True, slots=True)
class Exl3Layout:
    """The stored shape of a weight, the bits of its codes and its codebook, as its parts imply."""

    rows: int
    cols: int
    bits: int
    codebook: str


def fit(parts: Parts) -> Weight:
    """Return the weight, cropped to the shape of the original."""
    trellis = parts["trellis"]
    if len(trellis.shape) != 3 or trellis.shape[2] % TILE or not 1 <= trellis.shape[2] // TILE <= 8:
        raise FormatMismatch(f"an EXL3 trellis is (cols / 16, rows / 16, 16 · bits) with 1 to 8 bits, not {trellis}")
    cols, rows, bits = trellis.shape[0] * TILE, trellis.shape[1] * TILE, trellis.shape[2] // TILE
    if rows % BLOCK or cols % BLOCK or not rows * cols:
        raise FormatMismatch(f"{trellis} holds {rows} × {cols} weights, which should be multiples of {BLOCK}")
    for role, n in (("cols", cols), ("rows", rows)):
        factors = parts[role]
        if factors.shape != ((n,) if factors.dtype == "F16" else (n // TILE,)):
            raise FormatMismatch(f"{factors} should have a factor, or a sign bit, for each of {n} {role}")
    layer = Exl3Layout(rows, cols, bits, _find_codebook_name(parts))
    return parts.weight(
        fit_padded(parts, (rows, cols), BLOCK).shape,
        partial(dequantize, parts, layer),
        code_bits=bits,
        evidence=(f"EXL3, {bits} bits, codebook {layer.codebook}",),
        warnings=check_quant_method(parts, "exl3"),
    )


def _find_codebook_name(parts: Parts) -> str:
    markers = {name: entry for name in MULTIPLIERS if (entry := parts.get(name))}
    if len(markers) > 1:
        raise FormatMismatch(f"two codebooks are named: {' and '.join(map(str, markers.values()))}")
    for name, entry in markers.items():
        if entry.n != 1:
            raise FormatMismatch(f"{entry} should be one number: the multiplier of the codebook")
        stored = read_integers(entry)[0] & 0xFFFFFFFF
        if stored != MULTIPLIERS[name]:
            raise FormatMismatch(f"{entry} should hold {MULTIPLIERS[name]:#x}, not {stored:#x}: an unknown codebook")
        return name
    return "3inst"


def dequantize(parts: Parts, layer: Exl3Layout, chunk: Chunk, workspace: Workspace) -> Values:
    """Assemble the chunk, (r, c), from blocks of 128 rows."""
    values = torch.empty(chunk.shape, device=workspace.device)
    for number in range(chunk.row // BLOCK, -(-chunk.stop_row // BLOCK)):
        block = workspace.cache(
            "block", parts["trellis"], number, partial(_dequantize_block, parts, layer, number, workspace)
        )
        top = number * BLOCK
        first, stop = max(chunk.row, top), min(chunk.stop_row, top + BLOCK)
        values[first - chunk.row : stop - chunk.row] = block[first - top : stop - top, chunk.col : chunk.stop_col]
    return Values(values)


def _dequantize_block(parts: Parts, layer: Exl3Layout, number: int, workspace: Workspace) -> Tensor:
    """Dequantize the 128 rows of block ``number``, (128, cols) float32."""
    rows = _read_factors(parts["rows"], workspace)[number * BLOCK : (number + 1) * BLOCK]
    cols = _read_factors(parts["cols"], workspace)
    codes, table = _lay_out_codes(layer.bits, workspace.device), make_codebook(layer.codebook, workspace.device)
    tiles = workspace.read_whole("trellis", parts["trellis"]).view(torch.int32)  # (cols / 16, rows / 16, words)
    tiles = tiles[:, number * BLOCK // TILE : (number + 1) * BLOCK // TILE].transpose(0, 1)
    block = torch.empty(BLOCK, layer.cols, device=workspace.device)
    for left in range(0, layer.cols, COLUMNS_AT_ONCE):
        right = min(left + COLUMNS_AT_ONCE, layer.cols)
        of_columns = tiles[:, left // TILE : right // TILE]
        values = code_tiles.look_up(of_columns, codes, table, GENERATORS.get(layer.codebook))
        rotate(values, (cols[left:right], rows), block[:, left:right])
    return block


def rotate(values: Tensor, factors: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Set ``out``, (128, c), to diag(rows) · (H · ((values · H) · diag(cols))), as the module's docstring specifies.

    ``factors`` holds the columns' factors and the rows' factors. All tensors are float32, and ``values`` is contiguous.
    """
    cols, rows = factors
    kernel = choose_kernel().kernel if values.device.type == "cpu" else None
    if kernel is not None and hasattr(kernel.library, "quanterr_rotate_sides"):
        arguments = values.data_ptr(), len(cols), UNIT, cols.data_ptr(), rows.data_ptr()
        room = torch.empty(BLOCK, BLOCK)
        kernel.library.quanterr_rotate_sides(*arguments, out.data_ptr(), out.stride(0), room.data_ptr())
        return
    matrix = _make_scaled_hadamard(values.device)  # float32: in float64, the last digits would differ
    product = multiply(values.view(-1, BLOCK), matrix).view(values.shape).mul_(cols)
    torch.mul(multiply(matrix, product.t()), rows.unsqueeze(1), out=out)


@cache
def _make_scaled_hadamard(device: torch.device) -> Tensor:
    """Return H, (128, 128) float32."""
    return (hadamard.make_sylvester(BLOCK) * UNIT).float().to(device)


def _read_factors(entry: Entry, workspace: Workspace) -> Tensor:
    """Return the factor of each row or column, float32."""
    stored = workspace.read_whole(f"factors {entry.name.rpartition('.')[2]}", entry)
    if entry.dtype == "F16":
        return stored.float()
    bits = stored.unsqueeze(1) >> torch.arange(TILE, dtype=torch.int16, device=stored.device) & 1
    return 1.0 - 2.0 * bits.view(-1).float()


@cache
def _lay_out_codes(bits: int, device: torch.device) -> TileLayout:
    """Return the places of a tile's codes, for which the bits of each word run from high to low."""
    n, codes = 8 * bits, torch.empty(TILE, TILE, 3, dtype=torch.int32)
    for t in range(TILE * TILE):
        lane, i = divmod(t, 8)
        col = 2 * (lane % 4) + i % 2 + 8 * (i // 2 % 2)
        last, end = divmod(((t + 1) * bits - 1) % (32 * n), 32)
        codes[lane // 4 + 8 * (i // 4), col] = torch.tensor([last, (last - 1) % n, 31 - end])
    return TileLayout(TILE, TILE, codes.view(-1, 3).to(device))


@cache
def make_codebook(name: str, device: torch.device) -> Tensor:
    """Return the value of each code, (65536,) float32."""
    if generator := GENERATORS.get(name):
        return generator.make_table().to(device)
    y = torch.arange(1 << 16) * MULTIPLIERS[name] & 0xFFFFFFFF
    total = (y.unsqueeze(1) >> torch.arange(0, 32, 8) & 0xFF).sum(1).float() + 1024
    return (total * FACTOR + BIAS).to(device)


FORMATS = (Format("exl3", NEEDS, fit),)
