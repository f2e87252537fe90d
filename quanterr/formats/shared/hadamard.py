"""Hadamard matrices that rotate weights: Sylvester's, and a table times Sylvester's for other sizes.

    a power of two n    H[i, j] = (-1)^(number of ones in i & j)
    k · a power of two  kron(table of size k, Sylvester's), with the largest k below that divides n

    12, 20, 60, 108, 140     Paley's first construction, from the quadratic residues of q = k - 1
    28, 36                   Paley's second construction, from the quadratic residues of q = k / 2 - 1
    52, 116, 124, 156, 172   Williamson's construction, from four symmetric circulant matrices

The entries are 1 and -1: callers divide a product by sqrt(n). Not all tables are symmetric.

Reference: Cornell-RelaxML/quip-sharp@1d8f873e lib/utils/matmul_had.py; N. J. A. Sloane, A Library of Hadamard
Matrices.
"""

from functools import cache

import torch
from torch import Tensor

from quanterr.errors import FormatMismatch

FACTOR = 16  # largest factor of a Sylvester matrix: the fewest operations that torch still does fast
PALEY_1 = frozenset({12, 20, 60, 108, 140})
PALEY_2 = frozenset({28, 36})
WILLIAMSON = {  # first rows of the four circulants, one bit per entry, 1 means +1
    52: (0x14F2, 0x11F8, 0x1A65, 0x1090),
    116: (0x192EF749, 0x1ED1F8B7, 0x1465FA62, 0x1C650A63),
    124: (0x4E90C25C, 0x4E90C25C, 0x41D4CAE0, 0x7E2B351F),
    156: (0x7282619053, 0x7898528647, 0x73452128B3, 0x46A0EDC158),
    172: (0x467AECDD798, 0x6FC29B650FD, 0x7595E85EA6B, 0x63D260192F1),
}
SIZES = sorted(PALEY_1 | PALEY_2 | WILLIAMSON.keys(), reverse=True)


def make_sylvester(size: int) -> Tensor:
    """Return Sylvester's matrix of a power of two, (size, size) float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def make_table(size: int) -> Tensor:
    """Return the table of a size in SIZES, (size, size) float64."""
    if size in WILLIAMSON:
        return _make_williamson([_make_circulant(_parse_signs(row, size // 4)) for row in WILLIAMSON[size]])
    q = size - 1 if size in PALEY_1 else size // 2 - 1
    residues = {n * n % q for n in range(1, q)}
    core = _make_circulant(torch.tensor([0.0] + [1.0 if -n % q in residues else -1.0 for n in range(1, q)]).double())
    bordered = torch.ones(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 0], bordered[1:, 1:] = 0, core
    unit = torch.eye(q + 1, dtype=torch.float64)
    if size in PALEY_1:
        bordered[0, 1:] = -1
        return bordered + unit
    upper = torch.cat([bordered + unit, bordered - unit], 1)
    return torch.cat([upper, torch.cat([bordered - unit, -bordered - unit], 1)])


def _parse_signs(row: int, size: int) -> Tensor:
    return torch.tensor([1.0 if digit == "1" else -1.0 for digit in f"{row:0{size}b}"]).double()


def _make_circulant(first: Tensor) -> Tensor:
    return torch.stack([first.roll(n) for n in range(len(first))])


def _make_williamson(circulants: list[Tensor]) -> Tensor:
    a, b, c, d = circulants
    rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, 1) for row in rows])


def check_size(n: int) -> None:
    """Refuse a size for which no matrix is known.

    Raises:
        FormatMismatch: ``n`` is neither a power of two nor a size in SIZES times one.
    """
    rest = n // _find_table_size(n)
    if n < 1 or rest & (rest - 1):
        sizes = ", ".join(str(size) for size in sorted(SIZES))
        raise FormatMismatch(
            f"rotated by a Hadamard matrix of {n}, which is neither a power of two nor {sizes} times one"
        )


def _find_table_size(n: int) -> int:
    return next((size for size in SIZES if n % size == 0), 1)


@cache
def find_factors(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return small float64 matrices whose Kronecker product is the matrix of size ``n``, the outermost first."""
    size = _find_table_size(n)
    found, rest = [make_table(size).to(device)] if size > 1 else [], n // size
    while rest > 1:
        found.append(make_sylvester(min(rest, FACTOR)).to(device))
        rest //= len(found[-1])
    return tuple(found)


def multiply(source: Tensor, target: Tensor, n: int, inner: int) -> tuple[Tensor, Tensor]:
    """Multiply one axis of ``source``, float64 and contiguous, by the matrix of size ``n`` from the left.

    ``inner`` is the stride of that axis in elements. Both tensors are overwritten; returns the one that holds the
    product, in the shape of ``source``, and the other.
    """
    shape = source.shape
    for factor in reversed(find_factors(n, source.device)):
        size = len(factor)
        if inner == 1:
            torch.matmul(source.view(-1, size), factor.t(), out=target.view(-1, size))
        else:
            torch.matmul(factor, source.view(-1, size, inner), out=target.view(-1, size, inner))
        source, target, inner = target, source, inner * size
    return source.view(shape), target.view(shape)
