"""Explanations of a factor between a quantized weight and its original."""

from collections.abc import Iterable
from math import isfinite, log, log2

from quanterr.findings.limits import FACTOR_TOLERANCE
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.lazy_torch import Tensor
from quanterr.util.text import count

# The largest codes of formats. Scales are computed from them, so a quantizer that omits this factor or applies it twice
# is wrong by exactly this number.
LARGEST_CODES = {
    448.0: "the largest FP8 E4M3 number",
    57344.0: "the largest FP8 E5M2 number",
    240.0: "the largest FP8 E4M3 FNUZ number",
    127.0: "the largest INT8 code",
    128.0: "the number of negative INT8 codes",
    255.0: "the number of 8-bit steps",
    15.0: "the number of 4-bit steps",
    7.0: "the largest INT4 code",
    6.0: "the largest FP4 number",
    2688.0: "448 · 6, from the second scale of NVFP4",
}
# The factor as a power of the stored scale → what happened to the scale.
SCALE_POWERS = {
    0.5: "scales are applied twice, or stored squared",
    2.0: "scales are stored as their inverse",
    1.0: "scales are applied to values that already include them",
}


def explain_factor(
    factor: float,
    scales: ScaleStatistics | None,
    others: Iterable[float] = (),
    is_unscaled: bool = False,
    doubt: float = FACTOR_TOLERANCE,
) -> str:
    """Return what y = factor · x suggests, as the end of a sentence; empty if nothing fits.

    Args:
        factor: y divided by x.
        scales: statistics of the stored scales.
        others: the factors of all weights that one factor corrects; by chance, few of them are powers of two.
        is_unscaled: whether the codes are those of a scaled format, but no scale is stored.
        doubt: relative error of ``factor``; a number that differs by more does not explain it.
    """
    if is_unscaled:
        return ": no scale is stored for it; the real scale was dropped"
    if factor < 0:
        return ": the sign is inverted" if _is_near(-factor, 1, FACTOR_TOLERANCE) else ": the sign is inverted as well"
    scale = scales.low if scales and scales.low == scales.high and isfinite(scales.low) and scales.low > 0 else None
    if scale == 1:
        return ": the stored scale is 1; the real scale was dropped"
    if scale is not None and not _is_near(scale, 1, FACTOR_TOLERANCE):
        for power, description in SCALE_POWERS.items():
            if _is_near(factor, scale**power, doubt):
                return f": {description}"
    number = min(LARGEST_CODES, key=lambda number: abs(abs(log(factor)) - log(number)) if factor else 0.0)
    if _is_near(factor, number, doubt) or _is_near(factor, 1 / number, doubt):
        return f": {number:g}, {LARGEST_CODES[number]}, was omitted or applied twice"
    if _is_power(factor, doubt) and all(_is_power(other, FACTOR_TOLERANCE) for other in others):
        return ": a power of two, as a wrong exponent produces"
    return ""


def explain_factors(factors: Tensor, stored: Tensor) -> str:
    """Return what factors y / x suggest about the stored scales, as the end of a sentence; empty if nothing fits.

    Args:
        factors: float64, (n,), one per stored scale.
        stored: the stored scales, float64, (n,), in the same order.
    """
    usable = bool((factors > 0).all() and (stored > 0).all()) and len(factors) == len(stored) > 2
    if not usable:
        return ""
    f, s = factors.log(), stored.log()
    if float(s.std()) < FACTOR_TOLERANCE:
        return f": every stored scale is {float(stored[0]):.4g}; the real scales were dropped"
    for power, description in SCALE_POWERS.items():
        if _is_median_near(f, power * s):
            return f": {description}"
    right = s - f
    for by in (1, -1, len(s) // 2):
        if _is_median_near(right, s.roll(by)):
            return f": each scale belongs {count(abs(by), 'place')} {'later' if by > 0 else 'earlier'}"
    return ""


def _is_power(factor: float, doubt: float) -> bool:
    """Return True for a power of two, other than 1."""
    return factor > 0 and round(log2(factor)) != 0 and _is_near(factor, 2.0 ** round(log2(factor)), doubt)


def _is_median_near(a: Tensor, b: Tensor) -> bool:
    """Return True if the median difference of two tensors of logarithms is small."""
    return float((a - b).abs().median()) < FACTOR_TOLERANCE


def _is_near(a: float, b: float, doubt: float) -> bool:
    """Return True if two positive numbers are equal within the relative error ``doubt``."""
    return a > 0 and b > 0 and abs(log(a) - log(b)) < doubt
