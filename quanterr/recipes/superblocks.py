"""The K types of ggml: blocks of 256 elements, whose 8 or 16 parts have scales (and minima) of few bits each.

    gguf_q6_k    6-bit codes, parts of 16, 8-bit scales
    gguf_q5_k    5-bit codes, parts of 32, 6-bit scales and minima
    gguf_q4_k    4-bit codes, parts of 32, 6-bit scales and minima
    gguf_q3_k    3-bit codes, parts of 16, 6-bit scales
    gguf_q2_k    2-bit codes, parts of 16, 4-bit scales and minima

Scales are searched as llama.cpp searches them: several candidates for each part, of which the one with the least
weighted error is taken. Sums are in another order than in its C code, so that single codes may differ. Where the
importance of the columns is known, errors are weighted by it, as with an importance matrix there.

Reference: ggml-org/llama.cpp@b7180 ggml/src/ggml-quants.c make_qx_quants, make_q3_quants, make_qkx2_quants,
quantize_row_q…_K_ref; with importance make_qkx3_quants, make_qp_quants, quantize_row_q…_K_impl.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quanterr.recipes.base import bytes_of

LEAST = 1e-15  # a part whose elements are all smaller is zero: GROUP_MAX_EPS
PASSES = 5  # of make_q3_quants and make_qp_quants
FINE = [0.05 * n - 0.9 for n in range(37)]  # steps of the search with importance


def _nearest(x: Tensor, low: int, high: int) -> Tensor:
    return x.round().clamp_(low, high)


def _half(numbers: Tensor) -> Tensor:
    """Rounded to float16, (n, 1)."""
    return numbers.to(torch.float16).view(-1, 1)


def _with_minimum(
    x: Tensor, weights: Tensor, most: int, steps: Sequence[float], absolute: bool
) -> tuple[Tensor, Tensor]:
    """Scale and minimum of parts, (n, k) each, for codes from 0 to ``most``: make_qkx2_quants.

    ``steps`` are added to ``most`` in the candidates; ``absolute``: errors are not squared.
    """
    low, high = x.amin(2).clamp_(max=0), x.amax(2)
    spread = high - low
    flat = spread <= 0
    spread = torch.where(flat, 1.0, spread)
    sum_w, sum_x = weights.sum(2), (weights * x).sum(2)

    def cost(scale: Tensor, least: Tensor, codes: Tensor) -> Tensor:
        error = codes * scale[..., None] + least[..., None] - x
        return (weights * (error.abs_() if absolute else error.square_())).sum(2)

    best_scale, best_low = spread / most, low
    best = cost(best_scale, low, _nearest((x - low[..., None]) * (most / spread)[..., None], 0, most))
    for step in steps:
        inverse = (step + most) / torch.where(flat, 1.0, high - best_low)  # from the best minimum so far
        codes = _nearest((x - best_low[..., None]) * inverse[..., None], 0, most)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = weighted.sum(2), (weighted * codes).sum(2), (weighted * x).sum(2)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        scale = torch.where(least > 0, sum_xl / sum_l2, scale)
        least = least.clamp(max=0)
        found = cost(scale, least, codes)
        better = (determinant > 0) & (found < best)
        best = torch.where(better, found, best)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, least, best_low)
    return best_scale.masked_fill_(flat, 0), -best_low


def _symmetric(x: Tensor, most: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale of parts, (n, k), and codes, from -most to most - 1: make_qx_quants."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    zero = largest.abs() < LEAST
    largest = torch.where(zero, 1.0, largest)
    best, best_scale, best_codes = torch.zeros_like(largest[..., 0]), torch.zeros_like(largest[..., 0]), x
    for step in (0, *range(-9, 0), *range(1, 10)):
        codes = _nearest(x * (-(most + 0.1 * step) / largest), -most, most - 1)
        weighted = weights * codes
        sum_lx, sum_l2 = (weighted * x).sum(2), (weighted * codes).sum(2)
        better = (sum_l2 > 0) & ((sum_lx * sum_lx > best * sum_l2) | (step == 0))
        scale = sum_lx / sum_l2
        best = torch.where(better, scale * sum_lx, best)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better[..., None], codes, best_codes)
    return best_scale.masked_fill_(zero[..., 0], 0), best_codes


def _positive(x: Tensor, most: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale of numbers that are not negative, (n, 1), and their codes, (n, k), from 0 to most: make_qp_quants."""
    largest = x.amax(1, keepdim=True)
    zero = largest < LEAST
    largest = torch.where(zero, 1.0, largest)
    inverse, least = most / largest, torch.full_like(largest, torch.inf)
    for step in (0, *range(-4, 0), *range(1, 5)):
        own = (0.1 * step + most) / largest
        error = (weights * ((x * own).round_().clamp_(max=most) / own - x).square_()).sum(1, keepdim=True)
        inverse, least = torch.where(error < least, own, inverse), torch.minimum(error, least)
    codes = (x * inverse).round_().clamp_(max=most)
    sum_lx, sum_l2 = (weights * x * codes).sum(1), (weights * codes * codes).sum(1)
    for _ in range(PASSES):
        changed = torch.zeros((), dtype=torch.bool)
        for i in range(x.shape[1]):
            better, new, new_lx, new_l2 = _refined(x[:, i], weights[:, i], codes[:, i], (sum_lx, sum_l2), (0, most))
            codes[:, i] = torch.where(better, new, codes[:, i])
            sum_lx, sum_l2 = torch.where(better, new_lx, sum_lx), torch.where(better, new_l2, sum_l2)
            changed = changed | better.any()
        if not bool(changed):
            break
    scale = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)[:, None]
    return scale.masked_fill_(zero, 0), codes.masked_fill_(zero, 0)


def _refined(
    x: Tensor, weights: Tensor, codes: Tensor, sums: tuple[Tensor, Tensor], ends: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether another code of one element of each part is better, that code, and the sums with it."""
    lx, l2 = sums[0] - weights * x * codes, sums[1] - weights * codes * codes
    new = _nearest(x * l2 / torch.where(lx > 0, lx, 1.0), *ends)
    new_lx, new_l2 = lx + weights * x * new, l2 + weights * new * new
    gains = new_lx * new_lx * sums[1] > sums[0] * sums[0] * new_l2
    return (lx > 0) & (new != codes) & (new_l2 > 0) & gains, new, new_lx, new_l2


def _three_bits(x: Tensor) -> Tensor:
    """Scale of parts, (n, 16), for codes from -4 to 3, refined code by code: make_q3_quants."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    zero = largest.abs() < LEAST
    codes = _nearest(x * (-4 / torch.where(zero, 1.0, largest)), -4, 3)
    weights = x * x
    sum_lx, sum_l2 = (weights * x * codes).sum(2), (weights * codes * codes).sum(2)
    for _ in range(PASSES):
        changed = torch.zeros((), dtype=torch.bool)
        for i in range(x.shape[2]):
            sums = sum_lx, sum_l2
            better, new, new_lx, new_l2 = _refined(x[..., i], weights[..., i], codes[..., i], sums, (-4, 3))
            codes[..., i] = torch.where(better, new, codes[..., i])
            sum_lx, sum_l2 = torch.where(better, new_lx, sum_lx), torch.where(better, new_l2, sum_l2)
            changed = changed | better.any()
        if not bool(changed):
            break
    return torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0).masked_fill_(zero[..., 0], 0)


def _integers(numbers: Tensor, most: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """A unit, (n, 1) float16, and numbers that are not negative in it, (n, k), up to ``most``."""
    if weights is not None:
        unit, codes = _positive(numbers, most, weights)
        return _half(unit), codes
    largest = numbers.amax(1, keepdim=True)
    inverse = torch.where(largest > 0, most / largest, 0.0)
    return _half(largest / most), _nearest(numbers * inverse, 0, most)


def _codes_with_minimum(
    x: Tensor, found: tuple[Tensor, Tensor], most: int, scale_most: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d and dmin, (n, 1) float16; scales and minima of parts as integers, (n, k); codes, uint8 (n, 256).

    ``found`` are scales and minima; ``weights`` those of the parts, where importance is known.
    """
    (d, own), (dmin, least) = (_integers(each, scale_most, weights) for each in found)
    unit, offset = (d.float() * own)[..., None], (dmin.float() * least)[..., None]
    codes = _nearest((x + offset) / torch.where(unit == 0, 1.0, unit), 0, most)
    codes = torch.where(unit == 0, 0.0, codes)
    return d, dmin, torch.stack([own, least]).to(torch.uint8), codes.to(torch.uint8).view(len(x), 256)


def _weights(x: Tensor) -> Tensor:
    """Of Q4_K and Q5_K: the root of the mean square of a part, and the magnitude."""
    return x.abs() + x.square().mean(2, keepdim=True).sqrt_()


def _by_importance(x: Tensor, importance: Tensor, times: float) -> Tensor:
    """Importance times the root of x² and of ``times`` the mean square of the block."""
    squares = x.square()
    return importance.view(x.shape) * (squares + times * squares.mean((1, 2), keepdim=True)).sqrt_()


def _six_bit_pairs(pairs: Tensor) -> Tensor:
    """8 scales and 8 minima of 6 bits, (2, n, 8), in 12 bytes."""
    own, least = pairs
    return torch.cat(
        [
            own[:, :4] | (own[:, 4:] >> 4) << 6,
            least[:, :4] | (least[:, 4:] >> 4) << 6,
            (own[:, 4:] & 15) | (least[:, 4:] & 15) << 4,
        ],
        1,
    )


def _nibbles(codes: Tensor) -> Tensor:
    """The low 4 bits of each 32 beside those of the next 32, (n, 128)."""
    halves = (codes & 15).view(-1, 4, 2, 32)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(-1, 128)


def _crumbs(codes: Tensor) -> Tensor:
    """2-bit codes: four runs of 32 in 32 bytes, (n, 64)."""
    runs = codes.view(-1, 2, 4, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6).view(-1, 64)


def _pairs(
    x: Tensor, importance: Tensor | None, most: int, steps: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of Q4_K and Q5_K: d, dmin, scales and minima, codes."""
    if importance is None:
        found = _with_minimum(x, _weights(x), most, steps, absolute=False)
        return _codes_with_minimum(x, found, most, 63, None)
    weights = _by_importance(x, importance, 2.0)
    found = _with_minimum(x, weights, most, FINE, absolute=False)
    return _codes_with_minimum(x, found, most, 63, weights.sum(2))


def q4_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Blocks of Q4_K, (n, 144)."""
    d, dmin, pairs, codes = _pairs(x.view(-1, 8, 32), importance, 15, [0.1 * n - 1 for n in range(21)])
    return torch.cat([bytes_of(d), bytes_of(dmin), _six_bit_pairs(pairs), _nibbles(codes)], 1)


def q5_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Blocks of Q5_K, (n, 176)."""
    d, dmin, pairs, codes = _pairs(x.view(-1, 8, 32), importance, 31, [0.1 * n - 0.5 for n in range(16)])
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((codes >> 4).view(-1, 8, 32) << places).sum(1, dtype=torch.uint8)
    return torch.cat([bytes_of(d), bytes_of(dmin), _six_bit_pairs(pairs), high, _nibbles(codes)], 1)


def q2_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Blocks of Q2_K, (n, 84)."""
    x = x.view(-1, 16, 16)
    if importance is None:
        found, of_parts = _with_minimum(x, x.abs(), 3, [0.1 * n - 0.5 for n in range(16)], absolute=True), None
    else:
        weights = _by_importance(x, importance, 1.0)
        found, of_parts = _with_minimum(x, weights, 3, FINE, absolute=False), weights.sum(2)
    d, dmin, pairs, codes = _codes_with_minimum(x, found, 3, 15, of_parts)
    return torch.cat([pairs[0] | pairs[1] << 4, _crumbs(codes), bytes_of(d), bytes_of(dmin)], 1)


def _signed_integers(scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """d, (n, 1) float16; scales as integers from -most, (n, 16)."""
    at = scales.abs().argmax(1, keepdim=True)
    largest = scales.gather(1, at)
    none = largest.abs() < LEAST
    inverse = -most / torch.where(none, 1.0, largest)
    own = torch.where(none, 0.0, _nearest(scales * inverse, -most, most - 1))
    return _half(torch.where(none, 0.0, 1 / inverse)), own


def _codes_of(x: Tensor, d: Tensor, own: Tensor, most: int) -> Tensor:
    """Codes from 0, uint8 (n, 256), of parts with the scales d · own."""
    unit = (d.float() * own)[..., None]
    codes = _nearest(x / torch.where(unit == 0, 1.0, unit), -most, most - 1).add_(most)
    return torch.where(unit == 0, float(most), codes).to(torch.uint8).view(len(x), 256)


def q6_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Blocks of Q6_K, (n, 210)."""
    x = x.view(-1, 16, 16)
    scales, _ = _symmetric(x, 32, x * x if importance is None else importance.view(x.shape))
    d, own = _signed_integers(scales, 128)
    codes = _codes_of(x, d, own, 32)
    runs = codes.view(-1, 2, 4, 32)
    low = torch.stack(
        [runs[:, :, 0] & 15 | (runs[:, :, 2] & 15) << 4, runs[:, :, 1] & 15 | (runs[:, :, 3] & 15) << 4], 2
    )
    high = runs >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat([low.view(-1, 128), high.view(-1, 64), bytes_of(own.to(torch.int8)), bytes_of(d)], 1)


def q3_k(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Blocks of Q3_K, (n, 110)."""
    x = x.view(-1, 16, 16)
    if importance is None:
        d, own = _signed_integers(_three_bits(x), 32)
    else:
        weights = _by_importance(x, importance, 2.0)
        scales, _ = _symmetric(x, 4, weights)
        unit, found = _symmetric(scales[:, None], 32, weights.sum(2)[:, None])
        d, own = _half(unit), torch.where(unit == 0, 0.0, found[:, 0])
    codes = _codes_of(x, d, own, 4)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((codes >> 2).view(-1, 8, 32) << places).sum(1, dtype=torch.uint8)
    stored = (own + 32).to(torch.uint8)
    low = stored[:, :8] & 15 | (stored[:, 8:] & 15) << 4
    above = (stored >> 4).view(-1, 4, 4)
    above = above[:, 0] | above[:, 1] << 2 | above[:, 2] << 4 | above[:, 3] << 6
    return torch.cat([high, _crumbs(codes & 3), low, above, bytes_of(d)], 1)


K_TYPES = {"Q6_K": q6_k, "Q5_K": q5_k, "Q4_K": q4_k, "Q3_K": q3_k, "Q2_K": q2_k}
