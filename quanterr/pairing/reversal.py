"""Matrices whose axes are swapped: values show whether a weight was only reshaped, or transposed."""

from quanterr.formats import Weight
from quanterr.formats.reading import open_reader
from quanterr.lazy_torch import Tensor

MAX_COMPARED_LENGTH = 64  # maximum number of rows and columns that are compared
MIN_ELEMENTS = 64  # values of fewer elements may agree by chance
MIN_COSINE = 0.6  # values with a larger cosine are the same up to rounding


def describe_reversal(x: Weight, y: Weight) -> str:
    """Return what two matrices of reverse shapes have in common, as the end of a sentence."""
    n = min(MAX_COMPARED_LENGTH, *x.matrix)
    with open_reader() as reader:
        first, second = (reader.read_first_rows(weight, MAX_COMPARED_LENGTH * weight.matrix[1]) for weight in (x, y))
    transposed = _are_alike(first[:n, :n], second[:n, :n].t())
    as_many = min(first.numel(), second.numel())
    if _are_alike(first.flatten()[:as_many], second.flatten()[:as_many]):
        return "; its values are in the original's order: it was reshaped, not transposed"
    return "; its values are the original's, transposed" if transposed else "; transposed?"


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Return True if values are the same up to rounding and a factor."""
    return x.numel() >= MIN_ELEMENTS and float((x * y).sum()) > MIN_COSINE * float(x.norm() * y.norm())
