"""Tolerances of numbers that are computed twice in float32."""

from math import sqrt

ROUNDINGS = 4096  # on the way to an output of a small model: some 60 products of some 60 terms, one after the other


# How far an output may differ, relative to its norm, if it is computed twice in another order: roundings of 2^-24 add
# up at random on both sides.
OUTPUT_ERROR = sqrt(2) * 2**-24 * sqrt(ROUNDINGS)


# How far the noise of a model in bfloat16 may be off, relatively, if it is computed twice. Sums of float32 in another
# order round 1 of 2^11 values to bfloat16 the other way, by a unit. That is 3 % of the noise, as often towards the
# exact value as away from it: 1 % for some thousand roundings.
OF_BFLOAT16 = 3e-2


def of_squared_error(error):
    """Return how far ``error`` = ‖y - x‖² / ‖x‖² may be off, relatively, if x and y are computed in another order.

    y - x changes by OUTPUT_ERROR · ‖x‖ at most, which is OUTPUT_ERROR / √error of itself, and its square by twice that.
    """
    return 2 * OUTPUT_ERROR / sqrt(error)
