"""What a factor between a quantized weight and its original suggests."""

from math import isfinite, log, log2

from quanterr.worker import Scales

# Largest codes: scales are made with them, and a step that leaves one out, or repeats it, is off by just that.
LARGEST = {
    448.0: "the largest FP8 E4M3 number",
    57344.0: "the largest FP8 E5M2 number",
    240.0: "the largest FP8 E4M3 FNUZ number",
    127.0: "the largest INT8 code",
    128.0: "the number of INT8 codes of a sign",
    255.0: "the number of steps of 8 bits",
    15.0: "the number of steps of 4 bits",
    7.0: "the largest INT4 code",
    6.0: "the largest FP4 number",
    2688.0: "448 · 6, of the second scale of NVFP4",
}
NEAR = 0.01  # of the logarithm


def meaning(factor: float, scales: Scales | None) -> str:
    """What y = factor · x suggests, in words that follow a sentence; ``scales`` are those that are stored."""
    if factor < 0:
        return ": the sign is inverted" if _near(-factor, 1) else ": the sign is inverted as well"
    one = scales.low if scales and scales.low == scales.high and isfinite(scales.low) and scales.low > 0 else None
    if one == 1:
        return ": the scale that is stored is 1, the real one was dropped"
    if one is not None and not _near(one, 1):
        for power, told in (
            (0.5, "the scale is applied twice, or stored squared"),
            (2.0, "the scale is stored as its inverse"),
            (1.0, "the scale is applied to values that had it already"),
        ):
            if _near(factor, one**power):
                return f": {told}"
    for number, told in LARGEST.items():
        if _near(factor, number) or _near(factor, 1 / number):
            return f": {number:g}, {told}, was left out or used twice"
    if abs(log2(factor) - round(log2(factor))) < NEAR:
        return ": a power of two, as a wrong exponent makes"
    return ""


def _near(a: float, b: float) -> bool:
    return a > 0 and b > 0 and abs(log(a) - log(b)) < NEAR
