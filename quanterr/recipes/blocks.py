"""The legacy types of ggml, whose blocks of 32 elements have a scale each: ``gguf_q8_0``, ``gguf_q4_0`` and others.

    Q8_0    f16 d; 32 codes of 8 bits             d = max |x| / 127;       code = round(x / d), away from zero at a tie
    Q4_0    f16 d; 16 bytes                       d = (x with the largest magnitude) / -8;    code = ⌊x / d + 8.5⌋
    Q4_1    f16 d, f16 m; 16 bytes                d = (max - min) / 15, m = min;    code = ⌊(x - m) / d + 0.5⌋
    Q5_0    f16 d; 32 high bits; 16 bytes         as Q4_0 with -16 and 16.5
    Q5_1    f16 d, f16 m; 32 high bits; 16 bytes  as Q4_1 with 31

The low bits of the bytes hold the first 16 codes. Division is multiplication by 1 / d in float32, or by 0 if d is 0.

If the importance of the columns is known, scales are searched as llama.cpp searches them with an importance matrix.
Q8_0 is an exception in both.

A K type has blocks of 256 elements. A weight whose rows do not fill them falls back to a type with blocks of 32, as
llama-quantize does: see ``FALLBACKS``. ``:strict`` leaves such a weight unquantized.

Reference: ggml-org/llama.cpp (as of gguf 0.19.0) ggml/src/ggml-quants.c quantize_row_q…_ref, with importance
quantize_row_q…_impl; gguf-py gguf/quants.py; the fallbacks: src/llama-quant.cpp, tensor_type_fallback.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quanterr.checkpoints.ggml_types import BLOCKS
from quanterr.kernel.enums import Packing
from quanterr.kernel.rounding import (
    find_codes,
    find_largest,
    find_magnitudes,
    make_signed_bytes,
    make_truncated_integers,
)
from quanterr.lazy_torch import Tensor, torch
from quanterr.recipes.base import Encoder, Piece, Recipe, Source, StoredTensor, explain_partial_groups, view_bytes
from quanterr.recipes.searches import STEPS_WITH_MINIMUM, search_symmetric, search_with_minimum, weigh_by_importance
from quanterr.tensors.packing import pack_codes, pack_halves

BLOCK = 32
ROUND_AWAY_CODES = make_signed_bytes()
Quantize = Callable[..., Tensor]  # (n, 32) float32, and weights of that shape → uint8 (n, bytes of a block)


@dataclass(frozen=True)
class BlockEncoder(Encoder):
    """A type of ggml whose blocks are independent."""

    dtype: str
    quantize: Quantize
    weighs: bool = True  # whether errors are weighted by the importance of columns
    other: Recipe | None = None  # the fallback for rows that do not fill whole blocks

    def explain_refusal(self, source: Source) -> str | None:
        """Explain why rows do not fill whole blocks of this type or its fallback; None if they do."""
        fallback = self.fallback(source.cols)
        if fallback is None:
            return explain_partial_groups(source, BLOCKS[self.dtype][0])
        return fallback.encoder.explain_refusal(source)

    def fallback(self, cols: int) -> Recipe | None:
        """Return the recipe of a type with smaller blocks if rows do not fill the blocks of this type."""
        return self.other if cols % BLOCKS[self.dtype][0] else None

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List the blocks, which contain their scales."""
        return (StoredTensor("{weight}", self.dtype, (source.rows, source.cols)),)

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the largest |x| of each row, only to find NaN and infinity: scales are in the blocks."""
        return piece.find_magnitudes(piece.rows.shape[1])

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Return no tensors: scales are in the blocks."""
        return ()

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write the blocks of rows."""
        blocks = x.reshape(-1, BLOCKS[self.dtype][0])
        into = out.view(len(blocks), -1)
        if self.dtype not in LEGACY:
            weights = None if importance is None else importance.repeat(len(x)).view(blocks.shape)
            self.quantize(blocks, weights, into)
        elif importance is None or not self.weighs:
            into.copy_(self.quantize(blocks))
        else:  # in llama.cpp, K types use the mean square of a block instead of a row
            weights = weigh_by_importance(x, importance, x.square().mean(1, keepdim=True))
            into.copy_(self.quantize(blocks, weights.view(blocks.shape)))


def q8_0(x: Tensor) -> Tensor:
    """Quantize to blocks of Q8_0, (n, 32) float32 to (n, 34) uint8."""
    d = find_magnitudes(x, BLOCK)[:, None] / 127
    blocks = _start_blocks("Q8_0", d)
    find_codes(x, _invert(d), ROUND_AWAY_CODES, BLOCK, multiply=True, out=blocks[:, 2:])
    return blocks


def _start_blocks(dtype: str, d: Tensor) -> Tensor:
    """Return blocks, (n, bytes) uint8, that begin with the scales ``d``, (n, 1), as float16, and have no codes yet."""
    blocks = torch.empty(len(d), BLOCKS[dtype][1], dtype=torch.uint8)
    blocks.view(torch.float16)[:, :1] = d
    return blocks


def _find_signed_codes(x: Tensor, d: Tensor, half: int, packing: Packing, out: Tensor | None = None) -> Tensor:
    """Return codes from 0 to 2 · half - 1 of blocks with the scales ``d``; ``packing`` and ``out`` as in find_codes."""
    to, middle = make_truncated_integers(2 * half - 1), torch.full_like(d, half + 0.5)
    return find_codes(x, _invert(d), to, BLOCK, multiply=True, after=middle, packing=packing, out=out)


def _search_scale(x: Tensor, weights: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each block with the smallest weighted error, and its codes from 0 to 2 · half - 1."""
    codes = torch.empty_like(x)
    scale = search_symmetric(x[:, None], half, weights[:, None], codes[:, None])
    return scale, codes.add_(half).to(torch.uint8)


def _search_minimum(x: Tensor, weights: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Return stored scale and minimum of each block with the smallest weighted error, and codes up to ``highest``."""
    codes = torch.empty_like(x)
    scale, minimum = search_with_minimum(
        x[:, None], highest, STEPS_WITH_MINIMUM, weights[:, None], codes=codes[:, None]
    )
    return torch.cat([_to_half_bytes(scale), _to_half_bytes(-minimum)], 1), codes.to(torch.uint8)


def _quantize_from_minimum(x: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum of each block, as stored, and codes from 0 to ``highest``."""
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    d = (high - low) / highest
    to, half = make_truncated_integers(highest), torch.full_like(d, 0.5)
    codes = find_codes(x, _invert(d), to, BLOCK, multiply=True, before=low, after=half)
    return torch.cat([_to_half_bytes(d), _to_half_bytes(low)], 1), codes


def q4_0(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q4_0, (n, 32) float32 to (n, 18) uint8."""
    if weights is None:
        d = find_largest(x) / -8
        blocks = _start_blocks("Q4_0", d)
        _find_signed_codes(x, d, 8, Packing.HALVES, blocks[:, 2:])
        return blocks
    d, codes = _search_scale(x, weights, 8)
    return torch.cat([_to_half_bytes(d), pack_halves(codes)], 1)


def q4_1(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q4_1, (n, 32) float32 to (n, 20) uint8."""
    scales, codes = _quantize_from_minimum(x, 15) if weights is None else _search_minimum(x, weights, 15)
    return torch.cat([scales, pack_halves(codes)], 1)


def q5_0(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q5_0, (n, 32) float32 to (n, 22) uint8."""
    if weights is None:
        d = find_largest(x) / -16
        codes = _find_signed_codes(x, d, 16, Packing.BYTES)
    else:
        d, codes = _search_scale(x, weights, 16)
    return torch.cat([_to_half_bytes(d), pack_codes(codes >> 4, 1), pack_halves(codes & 15)], 1)


def q5_1(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q5_1, (n, 32) float32 to (n, 24) uint8."""
    scales, codes = _quantize_from_minimum(x, 31) if weights is None else _search_minimum(x, weights, 31)
    return torch.cat([scales, pack_codes(codes >> 4, 1), pack_halves(codes & 15)], 1)


def _invert(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _to_half_bytes(numbers: Tensor) -> Tensor:
    return view_bytes(numbers.to(torch.float16))


# The fallbacks of llama-quantize; older versions stored IQ4_NL in place of Q3_K and Q2_K.
FALLBACKS = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "Q4_0", "Q2_K": "Q4_0"}

LEGACY: dict[str, Quantize] = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1}
