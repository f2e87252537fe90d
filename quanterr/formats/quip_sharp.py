"""QuIP#: vectors of eight columns from the E8P lattice codebook, rotated on both sides by Hadamard matrices.

    Qidxs          i64               (rows, words): cols · bits / 64 words per row
    SU             f16, bf16, f32    (cols,): factors, mostly signs
    SV             f16, bf16, f32    (rows,)
    Wscale         f32, f16          one
    codebook_id    i64, i32          one: 7 E8P12, 2 bits; 17 E8P12RVQ4B, 4 bits; 18 E8P12RVQ3B, 3 bits
    scaleWH        f32, f16          (cols,); optional
    fuse_scales    f32, f16          one for the rows of each layer fused into this one; optional

    vectors    E8P12: e8p(code); in 4 bits + e8p(second code) / 3.45; in 3 bits + e81b(second code) / 2.04;
               quip_params in config.json may give another divisor (resid_scale_override)
    weight     diag(SV · Wscale) · H(rows) · vectors · H(cols)ᵀ · diag(SU / scaleWH)    H / sqrt(n): hadamard.py

E8P codes, four per word, are stored as (rows / 16, cols / 64, 8, 4): word (i, j, k, l) holds the codes of rows 16 i + 2
k and the next, for columns 64 j + 16 l and the next 8. The low 32 bits are four bytes: for the first row, the second
row, the first row's next columns, the second row's next columns. A byte indexes the vector of magnitudes. Bit 4 b + n
of the high 32 bits is sign bit b of the n-th vector. Sign 0 is flipped if the eight signs have odd parity; then 1/4 is
subtracted from the vector, otherwise added. The codes of three-bit residuals are bytes, in order, eight per word.

The magnitudes are the 227 vectors of {1/2, 3/2, 5/2}^8 of squared length up to 10, in order, and 29 of squared
length 12. E81B is E8's vectors of squared length up to 2, integers first, and 15 of length 2 on the axes.

Every element depends on all codes. So the weight is rotated along its rows once, a few columns at a time, and kept as
float32, 4 bytes an element, while it is being compared (2-bit codes and their sums are exact, others rounded); each
chunk is then rotated along its columns in float64 and rounded.

Reference: Cornell-RelaxML/quip-sharp@1d8f873e lib/codebook/latticee8_padded12.py, latticee8_padded12_rvq4bit.py,
latticee8_padded12_rvq3bit.py, lib/algo/quip.py incoherence_process.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from math import sqrt
from typing import NamedTuple

from quanterr.formats.base import FUSED, Chunk, Format, FormatMismatch, Parts, PartSpec, Values, Weight, Workspace
from quanterr.formats.shared import hadamard
from quanterr.formats.shared.config_checks import check_quant_method, read_integers
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.memory import room_for_weight

FLOATS = frozenset({"F16", "BF16", "F32"})
ONES = 0x11111111
QUARTERS = 4  # vectors are multiples of 1/4
UNIT = 64  # columns of a unit of codes
ELEMENTS_AT_ONCE = 1 << 16  # elements rotated at a time, so that the buffers stay in the cache
NORM_12 = (  # the 29 vectors of squared length 12, doubled
    "31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133 "
    "33133311 33133131 33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 "
    "31331313 13331133 13333311 13333131 13331331 13333113 13331313 11331333 33113331"
)
UNKNOWN_FUSED_ROWS = "the rows of its fuse_scales are known only from an original that stores the layers separately"
SPREAD = (0, 2, 4, 6, 1, 3, 5, 7)  # column of a vector that each sign bit belongs to
NEEDS = {
    "codes": PartSpec(("{module}.Qidxs",), frozenset({"I64"})),
    "cols": PartSpec(("{module}.SU",), FLOATS),
    "rows": PartSpec(("{module}.SV",), FLOATS),
    "global_scale": PartSpec(("{module}.Wscale",), FLOATS),
    "codebook": PartSpec(("{module}.codebook_id",), frozenset({"I64", "I32"})),
    "rescaled": PartSpec(("{module}.scaleWH",), FLOATS, optional=True),
    FUSED: PartSpec(("{module}.fuse_scales",), FLOATS, optional=True),
}


class LatticeCodebook(NamedTuple):
    """The codebook that a codebook_id names."""

    name: str
    bits: int
    residual: float = 1.0  # divisor of the residuals


CODEBOOKS = {
    7: LatticeCodebook("E8P12", 2),
    17: LatticeCodebook("E8P12RVQ4B", 4, 3.45),
    18: LatticeCodebook("E8P12RVQ3B", 3, 2.04),
}


class QuipLayout(NamedTuple):
    """The shape, bits and residual divisor of a weight, as its parts imply."""

    rows: int
    cols: int
    bits: int
    residual: float

    @property
    def cols_at_once(self) -> int:
        """The number of columns that are rotated at a time, so that the buffers stay in the cache."""
        return UNIT * max(ELEMENTS_AT_ONCE // (UNIT * self.rows), 1)


def fit(parts: Parts) -> Weight:
    """Return the weight, whose rows and columns follow from the numbers of factors."""
    codes, identity = parts["codes"], parts["codebook"]
    numbers = read_integers(identity) if identity.n == 1 else [-1]
    codebook = CODEBOOKS.get(numbers[0])
    if codebook is None:
        codebooks = ", ".join(f"{number} ({book.name})" for number, book in CODEBOOKS.items())
        raise FormatMismatch(f"{identity} does not name a supported codebook ({codebooks}), but number {numbers[0]}")
    rows, cols = parts["rows"].n, parts["cols"].n
    if rows % 16 or cols % 64 or codes.shape != (rows, cols * codebook.bits // 64):
        raise FormatMismatch(
            f"{codes} in {codebook.bits} bits should be {[rows, cols * codebook.bits // 64]}, for the {rows} rows of "
            f"{parts['rows']}, a multiple of 16, and the {cols} columns of {parts['cols']}, a multiple of 64"
        )
    for n in (rows, cols):
        hadamard.check_size(n)
    if parts["global_scale"].n != 1:
        raise FormatMismatch(f"its global scale {parts['global_scale']} should be one number")
    if (rescaled := parts.get("rescaled")) and rescaled.n != cols:
        raise FormatMismatch(f"{rescaled} should have one number for each of {cols} columns")
    if rescaled is None and parts.hints.config.get("rescale_WH") is True:
        raise FormatMismatch("config.json declares rescale_WH true, but scaleWH is missing")
    declared = parts.hints.config.get("resid_scale_override")
    residual = float(declared) if isinstance(declared, int | float) and declared > 0 else codebook.residual
    return parts.weight(
        (rows, cols),
        partial(dequantize, parts, QuipLayout(rows, cols, codebook.bits, residual)),
        code_bits=codebook.bits,
        refusal=UNKNOWN_FUSED_ROWS if parts.get(FUSED) else None,
        evidence=(f"QuIP#, codebook {codebook.name}",),
        warnings=check_quant_method(parts, "quip_sharp", "quip#", "quip"),
    )


def dequantize(parts: Parts, layer: QuipLayout, chunk: Chunk, workspace: Workspace) -> Values:
    """Return the chunk's rows of the weight, rotated along their columns, (r, c)."""
    make = partial(room_for_weight, (layer.rows, layer.cols), workspace.device)
    fill = partial(_rotate_rows, parts, layer, workspace)
    half = workspace.share("half", parts["codes"], make, fill, -(-layer.cols // layer.cols_at_once))
    cols = workspace.read_whole("cols", parts["cols"]).view(-1).double()
    if rescaled := parts.get("rescaled"):
        cols = cols / workspace.read_whole("rescaled", rescaled).view(-1).double()
    unit = workspace.read_whole("global_scale", parts["global_scale"]).view(()).double() / QUARTERS
    rows = workspace.read_whole("rows", parts["rows"]).view(-1)[chunk.row : chunk.stop_row].double()
    factors = rows * unit / sqrt(layer.rows * layer.cols), cols
    values = hadamard.multiply(half[chunk.row : chunk.stop_row], layer.cols, 1, factors)
    return Values(values[:, chunk.col : chunk.stop_col].contiguous())


def _rotate_rows(parts: Parts, layer: QuipLayout, workspace: Workspace, half: Tensor, piece: int) -> None:
    """Set a few columns of ``half``, (rows, cols) float32, to H(rows) · vectors, unscaled and in quarters."""
    left = piece * layer.cols_at_once
    right = min(left + layer.cols_at_once, layer.cols)
    units = slice(left // UNIT, right // UNIT)
    vectors = _decode_e8p(_read_e8p(parts, layer, 0, workspace)[:, units])
    if layer.bits == 4:
        residual = _decode_e8p(_read_e8p(parts, layer, 1, workspace)[:, units])
        vectors = vectors.double() + residual.double() / layer.residual
    elif layer.bits == 3:
        words = workspace.read_whole("codes", parts["codes"])[:, layer.cols // 32 :][:, units].contiguous()
        codes = words.view(torch.uint8).long()  # E81B codes
        residual = make_e81b_vectors(words.device)[codes].flatten(1)
        vectors = vectors.double() + residual.double() / layer.residual
    ones = torch.ones(max(vectors.shape), dtype=torch.float64, device=vectors.device)
    half[:, left:right] = hadamard.multiply(vectors, layer.rows, 0, (ones[: layer.rows], ones[: right - left]))


def _read_e8p(parts: Parts, layer: QuipLayout, number: int, workspace: Workspace) -> Tensor:
    """Return the words of the first or second E8P codes, (rows / 16, cols / 64, 8, 4) int64."""
    stored, n = workspace.read_whole("codes", parts["codes"]), layer.cols // 32
    if layer.bits > 2:
        part = stored[:, number * n : (number + 1) * n]
        stored = workspace.cache(f"e8p {number}", parts["codes"], 0, part.contiguous)
    return stored.view(layer.rows // 16, -1, 8, 4)


def _decode_e8p(words: Tensor) -> Tensor:
    """Decode E8P codes, (rows / 16, n, 8, 4) int64 words, to vectors in quarters: (rows, 64 n) float32."""
    tall, n = words.shape[:2]
    low, high = words.reshape(-1).view(torch.int32).view(-1, 2).unbind(1)
    number = torch.arange(4, dtype=torch.int32, device=words.device).unsqueeze(1)
    signs = high >> number & ONES
    for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0xFF)):
        signs = (signs | signs >> shift) & mask
    codes = (low >> 8 * number & 0xFF) << 8 | signs
    index = codes.view(2, 2, tall, n, 8, 4).permute(2, 4, 1, 3, 5, 0).reshape(16 * tall, -1)
    return make_e8p_vectors(words.device)[index].flatten(1).float()


@cache
def make_e8p_vectors(device: torch.device) -> Tensor:
    """Return the vector of each code in quarters, magnitudes in its high byte and signs in the low: (65536, 8) int8."""
    magnitudes = torch.tensor([v for v in product((0.5, 1.5, 2.5), repeat=8) if sum(x * x for x in v) <= 10])
    twelve = torch.tensor([[int(digit) / 2 for digit in vector] for vector in NORM_12.split()])
    table = torch.cat([magnitudes, twelve])[:, SPREAD]
    table[:, 7] *= 1 - 2 * (table.sum(1) % 2)
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    odd = bits.sum(1) % 2
    bits[:, 0] ^= odd
    spread = table.unsqueeze(1) * (1 - 2 * bits)  # (256, 256, 8)
    vectors = torch.empty_like(spread)
    vectors[..., SPREAD] = spread
    return _to_quarters(vectors + (0.25 - 0.5 * odd).unsqueeze(1), device)


@cache
def make_e81b_vectors(device: torch.device) -> Tensor:
    """Return the vector of each code in quarters, (256, 8) int8."""
    integers = product((-1.0, 0.0, 1.0), repeat=8)
    halves = product((-0.5, 0.5), repeat=8)
    vectors = [v for v in (*integers, *halves) if sum(x * x for x in v) <= 2 and sum(v) % 2 == 0]
    axes = torch.cat([2 * torch.eye(8), 0 - 2 * torch.eye(8)[:7]])
    return _to_quarters(torch.cat([torch.tensor(vectors), axes]), device)


def _to_quarters(vectors: Tensor, device: torch.device) -> Tensor:
    return (QUARTERS * vectors).to(device, torch.int8).view(-1, 8)


FORMATS = (Format("quip_sharp", NEEDS, fit),)
