"""Tolerances between two computations of one number, derived from their roundings."""

# A square of a difference is rounded to float32 three times, by up to 2^-24 of itself each time. In a sum of many
# the roundings average out.
FEW, MANY = 3 * 2.0**-24, 1e-7

MANY_ELEMENTS = 10_000

# Float64 adds a rounding of 2^-53 of the magnitudes for every doubling of the number of elements.
EXACT = 1e-13


FLOAT64 = 1e-9
