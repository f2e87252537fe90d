"""Hadamard matrices that rotate weights: Sylvester's, or for other sizes Kronecker products of a table and Sylvester's.

    a power of two n    H[i, j] = (-1)^(number of ones in i & j)
    k · a power of two  kron(table of size k, Sylvester's), with the largest k below that divides n

    12, 20, 60, 108, 140     Paley's first construction, from the quadratic residues of q = k - 1
    28, 36                   Paley's second construction, from the quadratic residues of q = k / 2 - 1
    52, 116, 124, 156, 172   Williamson's construction, from four symmetric circulant matrices

The entries are 1 and -1: callers divide a product by sqrt(n). Not all tables are symmetric. Products with Sylvester's
matrix are sums and differences of pairs in float64: first of neighbours, then of elements 2, 4, … apart. The compiled
kernel does the same operations in the same order.

Reference: Cornell-RelaxML/quip-sharp@1d8f873e lib/utils/matmul_had.py; N. J. A. Sloane, A Library of Hadamard
Matrices.
"""

from __future__ import annotations

from functools import cache

from quanterr.errors import FormatMismatch
from quanterr.kernel.library import choose_kernel
from quanterr.lazy_torch import Tensor, torch

SIDE_BY_SIDE = 16  # number of columns that the compiled kernel rotates together
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
        signs = [[1.0 if digit == "1" else -1.0 for digit in f"{row:0{size // 4}b}"] for row in WILLIAMSON[size]]
        a, b, c, d = (_make_circulant(torch.tensor(row).double()) for row in signs)
        rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
        return torch.cat([torch.cat(row, 1) for row in rows])
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


def _make_circulant(first: Tensor) -> Tensor:
    return torch.stack([first.roll(n) for n in range(len(first))])


def check_size(n: int) -> None:
    """Refuse a size for which no matrix is known.

    Raises:
        FormatMismatch: ``n`` is neither a power of two nor a size in SIZES times a power of two.
    """
    power = n // _find_table_size(n)
    if n < 1 or power & (power - 1):
        sizes = ", ".join(str(size) for size in sorted(SIZES))
        raise FormatMismatch(
            f"rotated by a Hadamard matrix of {n}, which is neither a power of two nor {sizes} times a power of two"
        )


def _find_table_size(n: int) -> int:
    return next((size for size in SIZES if n % size == 0), 1)


@cache
def _make_table_on(device: torch.device, size: int) -> Tensor:
    return make_table(size).to(device)


def multiply(
    source: Tensor, n: int, axis: int, factors: tuple[Tensor, Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Return diag(rows) · H · source · diag(cols), or with source · Hᵀ if ``axis`` is 1, as ``dtype`` or float32.

    ``source`` is (r, c) float32 or float64 with contiguous rows. H consists of matrices of size ``n`` for blocks along
    the axis; ``factors`` are float64, (r,) and (c,). Everything is computed in float64 and rounded once.
    """
    table = _find_table_size(n)
    if table > 1:
        source = _multiply_table(source, n, table, axis)
    size, is_native = n // table, source.device.type == "cpu" and dtype in (None, torch.float32)
    kernel = choose_kernel().kernel if is_native else None
    if kernel is None:
        wide = _multiply_sylvester(source, size, axis) * factors[1] * factors[0].unsqueeze(1)
        return wide.to(dtype or torch.float32)
    room, out = torch.empty(SIDE_BY_SIDE * size, dtype=torch.float64), torch.empty(source.shape)
    source_args = source.data_ptr(), source.dtype == torch.float64, source.stride(0)
    of_rows, of_cols = (side.data_ptr() for side in factors)
    kernel.library.quanterr_sylvester(
        *source_args, out.data_ptr(), out.stride(0), *source.shape, size, axis == 0, of_rows, of_cols, room.data_ptr()
    )
    return out


def _multiply_table(source: Tensor, n: int, size: int, axis: int) -> Tensor:
    """Multiply blocks along an axis by the table in the Kronecker product: (r, c) float64."""
    inner, wide, table = (
        n // size * (source.shape[1] if axis == 0 else 1),
        source.double(),
        _make_table_on(source.device, size),
    )
    if inner == 1:
        return (wide.reshape(-1, size) @ table.t()).view(source.shape)
    return torch.matmul(table, wide.reshape(-1, size, inner)).view(source.shape)


def _multiply_sylvester(source: Tensor, size: int, axis: int) -> Tensor:
    """Multiply blocks along an axis by Sylvester's matrix: (r, c) float64.

    Blocks of columns are transposed first, as torch is faster on long rows.
    """
    inner = source.shape[1] if axis == 0 else source.numel() // size
    wide = source.double()
    wide = (wide if axis == 0 else wide.reshape(inner, size).t()).reshape(-1)
    stride = inner
    while stride < size * inner:
        first, second = wide.view(-1, 2, stride).unbind(1)
        wide = torch.stack([first + second, first - second], 1).view(-1)
        stride *= 2
    return wide.view(source.shape) if axis == 0 else wide.view(size, inner).t().reshape(source.shape)
