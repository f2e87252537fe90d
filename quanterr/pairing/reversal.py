"""Matrices of the reverse shape: values show whether a weight was reshaped, which keeps its order, or transposed."""

from quanterr.formats import Weight
from quanterr.formats.reading import open_reader
from quanterr.lazy_torch import Tensor

CORNER = 64  # most rows and columns that are compared
FEWEST = 64  # fewest elements that are compared: fewer may be alike by chance
ALIKE = 0.6  # cosine above which values are the same, rounded


def describe_reversal(x: Weight, y: Weight) -> str:
    """Return what two matrices of reverse shapes have in common, as the end of a sentence."""
    n = min(CORNER, *x.matrix)
    with open_reader() as reader:
        first, second = (reader.read_first_rows(one, CORNER * one.matrix[1]) for one in (x, y))
    transposed = _are_alike(first[:n, :n], second[:n, :n].t())
    as_many = min(first.numel(), second.numel())
    if _are_alike(first.flatten()[:as_many], second.flatten()[:as_many]):
        return "; its values are in the original's order: it was reshaped, not transposed"
    return "; its values are the original's, transposed" if transposed else "; transposed?"


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Return True if values are the same up to rounding and a factor."""
    return x.numel() >= FEWEST and float((x * y).sum()) > ALIKE * float(x.norm() * y.norm())
