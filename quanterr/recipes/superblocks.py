"""The K types of ggml: blocks of 256 elements, whose 8 or 16 parts have scales (and minima) of few bits each.

    gguf_q6_k    6-bit codes, parts of 16, 8-bit scales
    gguf_q5_k    5-bit codes, parts of 32, 6-bit scales and minima
    gguf_q4_k    4-bit codes, parts of 32, 6-bit scales and minima
    gguf_q3_k    3-bit codes, parts of 16, 6-bit scales
    gguf_q2_k    2-bit codes, parts of 16, 4-bit scales and minima

Scales are searched as in llama.cpp. If the importance of the columns is known, errors are weighted by it, as llama.cpp
does with an importance matrix.

Reference: ggml-org/llama.cpp@b7180 ggml/src/ggml-quants.c quantize_row_q…_K_ref, with importance
quantize_row_q…_K_impl.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quanterr.recipes.base import view_bytes
from quanterr.recipes.searches import (
    FINE,
    LEAST,
    round_clamped,
    search_positive,
    search_symmetric,
    search_three_bits,
    search_with_minimum,
    weigh_by_importance,
)


def _to_half(numbers: Tensor) -> Tensor:
    """Round to float16, (n, 1)."""
    return numbers.to(torch.float16).view(-1, 1)


def _to_integers(numbers: Tensor, most: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a unit, (n, 1) float16, and nonnegative numbers as integers of that unit, (n, k), up to ``most``."""
    if weights is not None:
        unit, codes = search_positive(numbers, most, weights)
        return _to_half(unit), codes
    largest = numbers.amax(1, keepdim=True)
    inverse = torch.where(largest > 0, most / largest, 0.0)
    return _to_half(largest / most), round_clamped(numbers * inverse, 0, most)


def _encode_with_minimum(
    x: Tensor, found: tuple[Tensor, Tensor], most: int, scale_most: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d and dmin, (n, 1) float16; scales and minima of parts as integers, (n, k); codes, uint8 (n, 256).

    ``found`` are scales and minima; ``weights`` of the parts, (n, k), are given if importance is known.
    """
    (d, own), (dmin, least) = (_to_integers(each, scale_most, weights) for each in found)
    unit, offset = (d.float() * own)[..., None], (dmin.float() * least)[..., None]
    codes = (x + offset).div_(torch.where(unit == 0, 1.0, unit)).round_().clamp_(0, most).masked_fill_(unit == 0, 0)
    return d, dmin, torch.stack([own, least]).to(torch.uint8), codes.to(torch.uint8).view(len(x), 256)


def _weigh(x: Tensor) -> Tensor:
    """Return the error weights for Q4_K and Q5_K: the root mean square of a part plus the magnitude."""
    return x.abs().add_(x.square().mean(2, keepdim=True).sqrt_())


def _weigh_by_importance(x: Tensor, importance: Tensor, times: float) -> Tensor:
    """Return importance times the root of x² plus ``times`` the mean square of the block."""
    return weigh_by_importance(x, importance.view(x.shape), times * x.square().mean((1, 2), keepdim=True))


def _pack_six_bit_pairs(pairs: Tensor) -> Tensor:
    """Pack 8 scales and 8 minima of 6 bits, (2, n, 8), in 12 bytes."""
    own, least = pairs
    return torch.cat(
        [
            own[:, :4] | (own[:, 4:] >> 4) << 6,
            least[:, :4] | (least[:, 4:] >> 4) << 6,
            (own[:, 4:] & 15) | (least[:, 4:] & 15) << 4,
        ],
        1,
    )


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Pack the low 4 bits of each run of 32 codes with the next 32, (n, 128)."""
    halves = (codes & 15).view(-1, 4, 2, 32)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(-1, 128)


def _pack_two_bits(codes: Tensor) -> Tensor:
    """Pack 2-bit codes, four runs of 32 in 32 bytes, (n, 64)."""
    runs = codes.view(-1, 2, 4, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6).view(-1, 64)


def _quantize_pairs(
    x: Tensor, importance: Tensor | None, most: int, steps: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d, dmin, scales and minima, and codes of Q4_K or Q5_K."""
    if importance is None:
        scales, minima, _ = search_with_minimum(x, _weigh(x), most, steps)
        return _encode_with_minimum(x, (scales, minima), most, 63, None)
    weights = _weigh_by_importance(x, importance, 2.0)
    scales, minima, _ = search_with_minimum(x, weights, most, FINE)
    return _encode_with_minimum(x, (scales, minima), most, 63, weights.sum(2))


def q4_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q4_K, (n, 144) uint8."""
    d, dmin, pairs, codes = _quantize_pairs(x.view(-1, 8, 32), importance, 15, [0.1 * n - 1 for n in range(21)])
    return torch.cat([view_bytes(d), view_bytes(dmin), _pack_six_bit_pairs(pairs), _pack_nibbles(codes)], 1)


def q5_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q5_K, (n, 176) uint8."""
    d, dmin, pairs, codes = _quantize_pairs(x.view(-1, 8, 32), importance, 31, [0.1 * n - 0.5 for n in range(16)])
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((codes >> 4).view(-1, 8, 32) << places).sum(1, dtype=torch.uint8)
    return torch.cat([view_bytes(d), view_bytes(dmin), _pack_six_bit_pairs(pairs), high, _pack_nibbles(codes)], 1)


def q2_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q2_K, (n, 84) uint8."""
    x = x.view(-1, 16, 16)
    if importance is None:
        scales, minima, _ = search_with_minimum(x, x.abs(), 3, [0.1 * n - 0.5 for n in range(16)], absolute=True)
        of_parts = None
    else:
        weights = _weigh_by_importance(x, importance, 1.0)
        scales, minima, _ = search_with_minimum(x, weights, 3, FINE)
        of_parts = weights.sum(2)
    d, dmin, pairs, codes = _encode_with_minimum(x, (scales, minima), 3, 15, of_parts)
    return torch.cat([pairs[0] | pairs[1] << 4, _pack_two_bits(codes), view_bytes(d), view_bytes(dmin)], 1)


def _to_signed_integers(scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return d, (n, 1) float16, and scales as integers from -most to most - 1, (n, 16)."""
    at = scales.abs().argmax(1, keepdim=True)
    largest = scales.gather(1, at)
    none = largest.abs() < LEAST
    inverse = -most / torch.where(none, 1.0, largest)
    own = torch.where(none, 0.0, round_clamped(scales * inverse, -most, most - 1))
    return _to_half(torch.where(none, 0.0, 1 / inverse)), own


def _encode(x: Tensor, d: Tensor, own: Tensor, most: int) -> Tensor:
    """Return codes counted from 0, uint8 (n, 256), for parts with the scales d · own."""
    unit = (d.float() * own)[..., None]
    codes = (x / torch.where(unit == 0, 1.0, unit)).round_().clamp_(-most, most - 1).add_(most)
    return codes.masked_fill_(unit == 0, most).to(torch.uint8).view(len(x), 256)


def q6_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q6_K, (n, 210) uint8."""
    x = x.view(-1, 16, 16)
    scales, _ = search_symmetric(x, 32, x * x if importance is None else importance.view(x.shape))
    d, own = _to_signed_integers(scales, 128)
    codes = _encode(x, d, own, 32)
    runs = codes.view(-1, 2, 4, 32)
    low = torch.stack(
        [runs[:, :, 0] & 15 | (runs[:, :, 2] & 15) << 4, runs[:, :, 1] & 15 | (runs[:, :, 3] & 15) << 4], 2
    )
    high = runs >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat([low.view(-1, 128), high.view(-1, 64), view_bytes(own.to(torch.int8)), view_bytes(d)], 1)


def q3_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Quantize to blocks of Q3_K, (n, 110) uint8."""
    x = x.view(-1, 16, 16)
    if importance is None:
        d, own = _to_signed_integers(search_three_bits(x), 32)
    else:
        weights = _weigh_by_importance(x, importance, 2.0)
        scales, _ = search_symmetric(x, 4, weights)
        unit, found = search_symmetric(scales[:, None], 32, weights.sum(2)[:, None])
        d, own = _to_half(unit), torch.where(unit == 0, 0.0, found[:, 0])
    codes = _encode(x, d, own, 4)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((codes >> 2).view(-1, 8, 32) << places).sum(1, dtype=torch.uint8)
    stored = (own + 32).to(torch.uint8)
    low = stored[:, :8] & 15 | (stored[:, 8:] & 15) << 4
    above = (stored >> 4).view(-1, 4, 4)
    above = above[:, 0] | above[:, 1] << 2 | above[:, 2] << 4 | above[:, 3] << 6
    return torch.cat([high, _pack_two_bits(codes & 3), low, above, view_bytes(d)], 1)


K_TYPES = {"Q6_K": q6_k, "Q5_K": q5_k, "Q4_K": q4_k, "Q3_K": q3_k, "Q2_K": q2_k}
