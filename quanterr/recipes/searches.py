"""Searches for the scales of ggml's types as in llama.cpp, which tries several and takes the one with the least error.

Sums run over the elements of a group in order, in float32. Builds of llama.cpp may fuse multiplications and additions,
so single codes may differ. The compiled kernel computes the same numbers as the torch code here.
Reference: ggml-org/llama.cpp@b7180 ggml/src/ggml-quants.c make_qx_quants, make_q3_quants, make_qkx2_quants,
make_qkx3_quants, make_qp_quants.
"""

import ctypes
from collections.abc import Sequence
from functools import reduce

from quanterr.kernel.library import Kernel, choose_kernel
from quanterr.kernel.structs import MAX_PART_ELEMENTS
from quanterr.lazy_torch import Tensor, torch

MIN_MAGNITUDE = 1e-15  # a group whose elements are all smaller gets zeros: GROUP_MAX_EPS
MAX_PASSES = 5  # passes of make_q3_quants and make_qp_quants
SIDE_BY_SIDE = 8  # partial sums of squares, like torch's over 32 numbers; divides the length of a group
STEPS_WITH_MINIMUM = [0.05 * n - 0.9 for n in range(37)]  # steps of the search with importance
STEPS_WITHOUT_MINIMUM = [0.1 * n for n in (0, *range(-9, 0), *range(1, 10))]  # steps of the search without a minimum


def weigh_by_importance(x: Tensor, importance: Tensor, mean_square: Tensor) -> Tensor:
    """Return the weights of errors: importance · √(x² + the mean square of x's group)."""
    return importance * (x.square() + mean_square).sqrt_()


def round_clamped(x: Tensor, low: int, high: int) -> Tensor:
    """Round to the nearest integer from ``low`` to ``high``, ties to even."""
    return x.round().clamp_(low, high)


def search_with_minimum(
    x: Tensor,
    highest: int,
    steps: Sequence[float],
    weights: Tensor | None = None,
    *,
    absolute: bool = False,
    codes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Search scales and minima of groups, (n, k) each, for codes from 0 to ``highest``: make_qkx2_quants and make_qkx3.

    Each trial adds one of ``steps`` to ``highest``. With ``absolute``, errors are not squared. The default ``weights``
    of errors are |x|, plus the root mean square of the group if errors are squared. ``codes``, float32 like ``x``, is
    filled with the codes.
    """
    kernel, groups = _find_kernel(x, weights, codes), x.shape
    floors = None if absolute or weights is not None else _find_mean_squares(x).sqrt_()
    if kernel is not None:
        scale, minimum = torch.empty(groups[:2]), torch.empty(groups[:2])
        given, out = map(_address, (x, weights, floors)), map(_address, (scale, minimum, codes))
        numerators = _list_numbers([highest + step for step in steps])
        searched = scale.numel(), groups[2], 0, highest, numerators, len(numerators)
        kernel.library.quanterr_search_minimum(*given, *searched, absolute, *out)
        return scale, minimum
    if weights is None:
        weights = x.abs() if floors is None else x.abs() + floors[..., None]
    x, weights = _transpose(x), _transpose(weights)
    low, high = x.amin(0).clamp_(max=0), x.amax(0)
    spread = high - low
    flat = spread <= 0
    spread = torch.where(flat, 1.0, spread)
    products = weights * x
    sum_w, sum_x = _add_up(weights), _add_up(products)
    trial_codes, weighted, spare = (torch.empty_like(x) for _ in range(3))

    def encode(lowest: Tensor, inverse: Tensor) -> None:
        torch.sub(x, lowest, out=trial_codes).mul_(inverse).round_().clamp_(0, highest)

    def cost(scale: Tensor, lowest: Tensor) -> Tensor:
        difference = torch.mul(trial_codes, scale, out=spare).add_(lowest).sub_(x)
        return _add_up((difference.abs_() if absolute else difference.square_()).mul_(weights))

    best_scale, best_low = spread / highest, low
    chosen = low, highest / spread  # minimum and inverse scale that make the codes of the best trial
    encode(*chosen)
    best = cost(best_scale, low)
    for step in steps:
        # The scale is derived from the best minimum so far.
        tried = best_low, (step + highest) / torch.where(flat, 1.0, high - best_low)
        encode(*tried)
        sum_xl = _add_up(torch.mul(products, trial_codes, out=spare))
        sum_l = _add_up(torch.mul(weights, trial_codes, out=weighted))
        sum_l2 = _add_up(weighted.mul_(trial_codes))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        lowest = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        scale = torch.where(lowest > 0, sum_xl / sum_l2, scale)
        lowest = lowest.clamp(max=0)
        error = cost(scale, lowest)
        better = (determinant > 0) & (error < best)
        best = torch.where(better, error, best)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, lowest, best_low)
        chosen = torch.where(better, tried[0], chosen[0]), torch.where(better, tried[1], chosen[1])
    if codes is not None:
        encode(*chosen)
        codes.copy_(trial_codes.t().view(groups))
    return best_scale.masked_fill_(flat, 0).view(groups[:2]), (-best_low).view(groups[:2])


def _find_mean_squares(x: Tensor) -> Tensor:
    """Return the mean square of each group, (n, k); as in torch, eight partial sums each take every eighth element."""
    kernel = _find_kernel(x)
    if kernel is None:
        sums = _add_up(x.square().view(*x.shape[:2], -1, SIDE_BY_SIDE).movedim(2, 0))
        return _add_up(sums.movedim(2, 0)) / x.shape[2]
    means = torch.empty(x.shape[:2])
    kernel.library.quanterr_find_mean_squares(x.data_ptr(), means.numel(), x.shape[2], means.data_ptr())
    return means


def search_symmetric(x: Tensor, highest: int, weights: Tensor | None = None, codes: Tensor | None = None) -> Tensor:
    """Search the scales of groups, (n, k), for codes from -highest to highest - 1: make_qx_quants.

    Errors are weighted by ``weights``, or by x². ``codes``, float32 like ``x``, is filled with the codes.
    """
    kernel, groups = _find_kernel(x, weights, codes), x.shape
    if kernel is not None:
        scale, numerators = (
            torch.empty(groups[:2]),
            _list_numbers([-(highest + step) for step in STEPS_WITHOUT_MINIMUM]),
        )
        given, out = map(_address, (x, weights)), map(_address, (scale, codes))
        searched = scale.numel(), groups[2], -highest, highest - 1, numerators, len(numerators)
        kernel.library.quanterr_search_symmetric(*given, *searched, *out)
        return scale
    x, weights = _transpose(x), _transpose(x * x if weights is None else weights)
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    zero = largest.abs() < MIN_MAGNITUDE
    largest = torch.where(zero, 1.0, largest)
    best, best_scale, best_inverse = (torch.zeros_like(largest) for _ in range(3))
    products = weights * x
    trial_codes, spare = torch.empty_like(x), torch.empty_like(x)
    for step in STEPS_WITHOUT_MINIMUM:
        inverse = -(highest + step) / largest
        torch.mul(x, inverse, out=trial_codes).round_().clamp_(-highest, highest - 1)
        sum_lx = _add_up(torch.mul(products, trial_codes, out=spare))
        sum_l2 = _add_up(torch.mul(weights, trial_codes, out=spare).mul_(trial_codes))
        better = (sum_l2 > 0) & ((sum_lx * sum_lx > best * sum_l2) | (step == 0))
        scale = sum_lx / sum_l2
        best = torch.where(better, scale * sum_lx, best)
        best_scale = torch.where(better, scale, best_scale)
        best_inverse = torch.where(better, inverse, best_inverse)
    if codes is not None:
        codes.copy_(round_clamped(x * best_inverse, -highest, highest - 1).t().view(groups))
    return best_scale.masked_fill_(zero, 0).view(groups[:2])


def search_positive(x: Tensor, highest: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Search scales of nonnegative numbers, (n, 1), and their codes, (n, k), from 0 to ``highest``: make_qp_quants."""
    largest = x.amax(1, keepdim=True)
    zero = largest < MIN_MAGNITUDE
    largest = torch.where(zero, 1.0, largest)
    inverse, min_error = highest / largest, torch.full_like(largest, torch.inf)
    for step in (0, *range(-4, 0), *range(1, 5)):
        tried = (0.1 * step + highest) / largest
        error = (weights * ((x * tried).round_().clamp_(max=highest) / tried - x).square_()).sum(1, keepdim=True)
        inverse, min_error = torch.where(error < min_error, tried, inverse), torch.minimum(error, min_error)
    codes = (x * inverse).round_().clamp_(max=highest)
    scale, codes = _refine(x, weights, codes, (0, highest))
    return scale[:, None].masked_fill_(zero, 0), codes.masked_fill(zero, 0)


def search_three_bits(x: Tensor) -> Tensor:
    """Search the scales of groups, (n, k), for codes from -4 to 3, then refine code by code: make_q3_quants."""
    kernel, groups, ends = _find_kernel(x), x.shape, (-4, 3)
    if kernel is not None:
        scales = torch.empty(groups[:2])
        kernel.library.quanterr_refine(x.data_ptr(), None, scales.numel(), groups[2], *ends, None, scales.data_ptr())
        return scales
    x = x.reshape(-1, groups[2])
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    zero = largest.abs() < MIN_MAGNITUDE
    codes = round_clamped(x * (ends[0] / torch.where(zero, 1.0, largest)), *ends)
    scale, _ = _refine(x, x * x, codes, ends)
    return scale.masked_fill_(zero[:, 0], 0).view(groups[:2])


def _find_kernel(x: Tensor, *others: Tensor | None) -> Kernel | None:
    """Return the kernel if it can search these groups, (..., elements); None if it cannot, or is not compiled."""
    given = [x, *(each for each in others if each is not None)]
    are_alike = all(each.shape == x.shape and each.dtype == torch.float32 for each in given)
    can_be_read = all(each.is_cpu and each.is_contiguous() for each in given)  # the kernel reads their memory directly
    return choose_kernel().kernel if are_alike and can_be_read and x.shape[-1] <= MAX_PART_ELEMENTS else None


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _list_numbers(numbers: Sequence[float]) -> "ctypes.Array[ctypes.c_float]":
    return (ctypes.c_float * len(numbers))(*numbers)


def _transpose(x: Tensor) -> Tensor:
    """Copy groups, (..., elements), to (elements, groups), so that sums over elements are sums of rows."""
    return x.reshape(-1, x.shape[-1]).t().contiguous()


def _add_up(x: Tensor) -> Tensor:
    """Add the rows of ``x`` one after the other, as torch's ``sum`` may use another order."""
    total: Tensor = reduce(torch.add, x)
    return total


def _refine(x: Tensor, weights: Tensor, codes: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Refine the scales, (n,), and codes, (n, k), of groups by changing each code that improves the fit."""
    kernel = _find_kernel(x, weights, codes)
    if kernel is not None:
        codes, scale = codes.clone(), torch.empty(len(x))
        given, out = (x.data_ptr(), weights.data_ptr()), (codes.data_ptr(), scale.data_ptr())
        kernel.library.quanterr_refine(*given, *x.shape, *ends, *out)
        return scale, codes
    x, weights, codes = _transpose(x), _transpose(weights), _transpose(codes)
    sum_lx, sum_l2 = _add_up(weights * x * codes), _add_up(weights * codes * codes)
    for _ in range(MAX_PASSES):
        changed = torch.zeros((), dtype=torch.bool, device=x.device)
        for w, values, code in zip(weights, x, codes, strict=True):
            lx, l2 = sum_lx - w * values * code, sum_l2 - w * code * code
            new = round_clamped(values * l2 / torch.where(lx > 0, lx, 1.0), *ends)
            new_lx, new_l2 = lx + w * values * new, l2 + w * new * new
            better = (lx > 0) & (new != code) & (new_l2 > 0) & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            code.copy_(torch.where(better, new, code))
            sum_lx, sum_l2 = torch.where(better, new_lx, sum_lx), torch.where(better, new_l2, sum_l2)
            changed = changed | better.any()
        if not bool(changed):
            break
    return torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0), codes.t()
