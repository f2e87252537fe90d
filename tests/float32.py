"""Tolerances of numbers that are computed twice in float32."""

from math import sqrt

ROUNDINGS = 4096  # on the way to an output of a small model: some 60 products of some 60 terms, one after the other


def of_squared_error(error):
    """Return how far ``error`` = ‖y - x‖² / ‖x‖² may be off, relatively, if x and y are computed in another order.

    Roundings of 2^-24 of the output add up at random, to η = 2^-24 · √ROUNDINGS of ‖x‖ on each of both sides. So y - x
    changes by √2 η ‖x‖ at most, which is √2 η / √error of itself, and its square by twice that.
    """
    return 2 * sqrt(2) * 2**-24 * sqrt(ROUNDINGS) / sqrt(error)
