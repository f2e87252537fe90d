"""Matrices of the reverse shape: values show whether a weight was reshaped, which keeps its order, or transposed."""

from quanterr.formats import Weight
from quanterr.formats.reading import Reader, open_reader
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.chunks import CPU_CHUNK, Cut

CORNER = 64  # most rows and columns that are compared
FEWEST = 64  # fewest elements that are compared: fewer may be alike by chance
ALIKE = 0.6  # cosine above which values are the same, rounded


def describe_reversal(x: Weight, y: Weight) -> str:
    """Return what two matrices of reverse shapes have in common, as the end of a sentence."""
    n = min(CORNER, *x.matrix)
    with open_reader() as reader:
        first, second = (_read_rows(one, reader) for one in (x, y))
    transposed = _are_alike(first[:n, :n], second[:n, :n].t())
    as_many = min(first.numel(), second.numel())
    if _are_alike(first.flatten()[:as_many], second.flatten()[:as_many]):
        return "; its values are in the original's order: it was reshaped, not transposed"
    return "; its values are the original's, transposed" if transposed else "; transposed?"


def _read_rows(weight: Weight, reader: Reader) -> Tensor:
    """Return the first rows of a matrix."""
    rows, cols = weight.matrix
    chunks = Cut(min(rows, CORNER), cols, CPU_CHUNK)
    return torch.cat([reader.read(weight, chunk).double() for chunk in chunks])


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Return True if values are the same up to rounding and a factor."""
    return x.numel() >= FEWEST and float((x * y).sum()) > ALIKE * float(x.norm() * y.norm())
