"""Searches for the scales of ggml's types as in llama.cpp: the candidate with the least weighted error wins.

Sums are in another order than in the C code, so single codes may differ.
Reference: ggml-org/llama.cpp@b7180 ggml/src/ggml-quants.c make_qx_quants, make_q3_quants, make_qkx2_quants,
make_qkx3_quants, make_qp_quants.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1e-15  # a part whose elements are all smaller is zero: GROUP_MAX_EPS
PASSES = 5  # in make_q3_quants and make_qp_quants
FINE = [0.05 * n - 0.9 for n in range(37)]  # steps of the search with importance


def weigh_by_importance(x: Tensor, importance: Tensor, mean_square: Tensor) -> Tensor:
    """Return the weights of errors: importance times the root of x² plus the mean square of x's part."""
    return importance * (x.square() + mean_square).sqrt_()


def round_clamped(x: Tensor, low: int, high: int) -> Tensor:
    """Round to the nearest integer from ``low`` to ``high``, ties to even."""
    return x.round().clamp_(low, high)


def search_with_minimum(
    x: Tensor, weights: Tensor, most: int, steps: Sequence[float], absolute: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Search scale and minimum of parts, (n, k) each, and codes from 0 to ``most``: make_qkx2_quants, make_qkx3_quants.

    Candidates add ``steps`` to ``most``; ``absolute``: errors are not squared.
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
    best_codes = round_clamped((x - low[..., None]) * (most / spread)[..., None], 0, most)
    best = cost(best_scale, low, best_codes)
    for step in steps:
        inverse = (step + most) / torch.where(flat, 1.0, high - best_low)  # uses the best minimum so far
        codes = round_clamped((x - best_low[..., None]) * inverse[..., None], 0, most)
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
        best_codes = torch.where(better[..., None], codes, best_codes)
    return best_scale.masked_fill_(flat, 0), -best_low, best_codes


def search_symmetric(x: Tensor, most: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Search the scale of parts, (n, k), and codes from -most to most - 1: make_qx_quants."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    zero = largest.abs() < LEAST
    largest = torch.where(zero, 1.0, largest)
    best, best_scale, best_codes = torch.zeros_like(largest[..., 0]), torch.zeros_like(largest[..., 0]), x
    for step in (0, *range(-9, 0), *range(1, 10)):
        codes = round_clamped(x * (-(most + 0.1 * step) / largest), -most, most - 1)
        weighted = weights * codes
        sum_lx, sum_l2 = (weighted * x).sum(2), (weighted * codes).sum(2)
        better = (sum_l2 > 0) & ((sum_lx * sum_lx > best * sum_l2) | (step == 0))
        scale = sum_lx / sum_l2
        best = torch.where(better, scale * sum_lx, best)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better[..., None], codes, best_codes)
    return best_scale.masked_fill_(zero[..., 0], 0), best_codes


def search_positive(x: Tensor, most: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Search the scale of nonnegative numbers, (n, 1), and codes, (n, k), from 0 to ``most``: make_qp_quants."""
    largest = x.amax(1, keepdim=True)
    zero = largest < LEAST
    largest = torch.where(zero, 1.0, largest)
    inverse, least = most / largest, torch.full_like(largest, torch.inf)
    for step in (0, *range(-4, 0), *range(1, 5)):
        own = (0.1 * step + most) / largest
        error = (weights * ((x * own).round_().clamp_(max=most) / own - x).square_()).sum(1, keepdim=True)
        inverse, least = torch.where(error < least, own, inverse), torch.minimum(error, least)
    scale, codes = _refine(x, weights, (x * inverse).round_().clamp_(max=most), (0, most))
    return scale[:, None].masked_fill_(zero, 0), codes.masked_fill_(zero, 0)


def search_three_bits(x: Tensor) -> Tensor:
    """Search the scale of parts, (n, 16), for codes from -4 to 3, refined code by code: make_q3_quants."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    zero = largest.abs() < LEAST
    codes = round_clamped(x * (-4 / torch.where(zero, 1.0, largest)), -4, 3)
    scale, _ = _refine(x, x * x, codes, (-4, 3))
    return scale.masked_fill_(zero[..., 0], 0)


def _refine(x: Tensor, weights: Tensor, codes: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Refine scales of parts, (...), and codes, (..., elements), by changing each code where that improves the fit."""
    sum_lx, sum_l2 = (weights * x * codes).sum(-1), (weights * codes * codes).sum(-1)
    for _ in range(PASSES):
        changed = torch.zeros((), dtype=torch.bool)
        for i in range(x.shape[-1]):
            w, own, code = weights[..., i], x[..., i], codes[..., i]
            lx, l2 = sum_lx - w * own * code, sum_l2 - w * code * code
            new = round_clamped(own * l2 / torch.where(lx > 0, lx, 1.0), *ends)
            new_lx, new_l2 = lx + w * own * new, l2 + w * new * new
            better = (lx > 0) & (new != code) & (new_l2 > 0) & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            codes[..., i] = torch.where(better, new, code)
            sum_lx, sum_l2 = torch.where(better, new_lx, sum_lx), torch.where(better, new_l2, sum_l2)
            changed = changed | better.any()
        if not bool(changed):
            break
    return torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0), codes
