"""Student's t distribution: the p-value of a t, and the t of a p-value."""

from math import atan, cos, pi, sin, sqrt, tan

BISECTIONS = 60  # steps, which find an angle to the last bit of a float64


def compute_p_value(t: float, freedom: int) -> float:
    """Return the two-sided p-value of Student's t for an integer number of degrees of freedom.

    Reference: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = atan(t / sqrt(freedom))
    square, term, total = cos(angle) ** 2, 1.0, 1.0
    start = 2 if freedom % 2 == 0 else 3
    for k in range(start, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if freedom % 2 == 0:
        within = sin(angle) * total
    else:
        within = 2 / pi * (angle + (sin(angle) * cos(angle) * total if freedom > 1 else 0.0))
    return min(max(1 - within, 0.0), 1.0)


def find_t(p: float, freedom: int) -> float:
    """Return t for a two-sided p-value in (0, 1), by bisection of the angle atan(t / sqrt(freedom))."""
    low, high = 0.0, pi / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if compute_p_value(sqrt(freedom) * tan(middle), freedom) > p:
            low = middle
        else:
            high = middle
    return sqrt(freedom) * tan(low)
