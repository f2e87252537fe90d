"""The matrix of a transform of compressed-tensors, which multiplies the inputs of a layer while the model runs.

    T          (n, n) float; with ``perm``, T[perm][:, perm] is used
    V          T for a random matrix; T / sqrt(n), or its transpose, for a Hadamard matrix

A Hadamard matrix is taken apart: T = diag(signs) · kron(B, S) with Sylvester's S of the largest size s that fits, and B
of size m = n / s. So the products cost n · (m + log s) operations, not n², for each row. A random matrix is B itself.

Products are computed in float64 and rounded once.

Reference: vllm-project/compressed-tensors 0.20.0 transform/factory/hadamard.py, random_hadamard.py,
matrix_multiply.py, transform/utils/hadamard.py.
"""

from dataclasses import dataclass
from functools import partial
from math import isqrt, sqrt
from typing import NamedTuple

from quanterr.checkpoints import Entry
from quanterr.errors import CheckpointError
from quanterr.formats.shared import hadamard
from quanterr.lazy_torch import Tensor, torch
from quanterr.tensors.workspace import Workspace


class Factors(NamedTuple):
    """The factors of T = diag(signs) · kron(middle, Sylvester's matrix)."""

    signs: Tensor  # (n,) float64
    middle: Tensor  # (m, m) float64
    inverse: Tensor  # (m, m) float64: inverse of ``middle``


@dataclass(frozen=True, slots=True)
class TransformMatrix:
    """The matrix V of a transform; the methods multiply each run of ``n`` columns of rows, (r, c), in place."""

    n: int
    entry: Entry | None  # T; None: Sylvester's
    perm: Entry | None = None  # (n,) I64
    is_hadamard: bool = True
    is_transposed: bool = False  # V is the transpose of T

    def apply(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply by V, as the model does with inputs."""
        return self._multiply(rows, workspace, self.is_transposed, False)

    def undo(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply by the inverse of V."""
        return self._multiply(rows, workspace, self.is_transposed, True)

    def apply_to_weight(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply by the transposed inverse of V, as was done to a weight that takes transformed inputs."""
        return self._multiply(rows, workspace, not self.is_transposed, True)

    def undo_in_weight(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply by the transpose of V: plain inputs then give the products that transformed inputs gave before."""
        return self._multiply(rows, workspace, not self.is_transposed, False)

    def _multiply(self, rows: Tensor, workspace: Workspace, transposed: bool, inverted: bool) -> Tensor:
        """Multiply by T or its inverse, or by the transpose of either."""
        factors = self._make_factors(workspace)
        m = len(factors.middle)
        size = self.n // m
        wide = rows.double().reshape(-1, self.n)
        perm = None if self.perm is None else workspace.read_whole("transform_perm", self.perm)
        if perm is not None:
            wide = torch.empty_like(wide).index_copy_(1, perm, wide)
        if inverted == transposed:
            wide = wide * factors.signs
        middle = factors.inverse if inverted else factors.middle
        if m > 1:
            side = middle if transposed else middle.t()  # multiplies from the left
            by_size = wide.view(-1, m, size)
            wide = (wide @ side.t() if size == 1 else torch.matmul(side, by_size)).view(-1, self.n)
        cols = factors.signs if inverted != transposed else torch.ones_like(factors.signs)
        if self.is_hadamard:
            cols = cols * (sqrt(self.n) / size if inverted else 1 / sqrt(self.n))
        ones = torch.ones(len(wide), dtype=torch.float64, device=wide.device)
        out = hadamard.multiply(wide, size, 1, (ones, cols), rows.dtype)
        return rows.copy_((out if perm is None else out[:, perm]).reshape(rows.shape))

    def _make_factors(self, workspace: Workspace) -> Factors:
        if self.entry is None:
            ones = torch.ones(self.n, dtype=torch.float64, device=workspace.device)
            return Factors(ones, ones[:1, None], ones[:1, None])
        packed = workspace.share("transform", self.entry, partial(self._read, self.entry, workspace))
        m = isqrt((len(packed) - self.n) // 2)
        middle, inverse = packed[self.n :].view(2, m, m)
        return Factors(packed[: self.n], middle, inverse)

    def _read(self, entry: Entry, workspace: Workspace) -> Tensor:
        """Read T, take it apart, and return its factors end to end, as workspaces share one tensor per entry.

        Raises:
            CheckpointError: T should be a Hadamard matrix but is not, or cannot be inverted.
        """
        matrix = workspace.read("stored_transform", entry, 0, (self.n, self.n))
        if not self.is_hadamard:
            middle = matrix.double()
            inverse, failed = torch.linalg.inv_ex(middle)
            if failed or not bool(inverse.isfinite().all()):
                problem = "the matrix of a transform has no inverse; export the model again"
                raise CheckpointError(f"{entry.file}: {entry}: {problem}")
            signs = torch.ones(self.n, dtype=torch.float64, device=middle.device)
            return torch.cat([signs, middle.flatten(), inverse.flatten()])
        signs, middle = _take_apart(matrix)
        m = len(middle)
        unit = m * torch.eye(m, dtype=torch.float64, device=middle.device)
        if not bool((matrix.abs() == 1).all()) or not torch.equal(middle @ middle.t(), unit):
            raise CheckpointError(
                f"{entry.file}: {entry}: the matrix of a Hadamard transform should hold 1 and -1 in orthogonal rows; "
                "export the model again"
            )
        return torch.cat([signs, middle.flatten(), (middle.t() / m).flatten()])


def _take_apart(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs of rows, (n,), and the smallest B, (m, m): ``matrix`` = diag(signs) · kron(B, Sylvester's).

    Only Hadamard matrices can be taken apart like this; the caller finds out from B whether ``matrix`` is one.
    """
    n = len(matrix)
    signs = matrix[:, 0].clone()
    size = n & -n
    while size > 1:
        middle = matrix[::size, ::size] * signs[::size, None]
        inner = hadamard.make_sylvester(size).to(matrix)
        blocks = zip(matrix.view(-1, size, n), signs.view(-1, size), middle, strict=True)
        if all(
            torch.equal(rows * row_factors[:, None], torch.kron(row[None], inner)) for rows, row_factors, row in blocks
        ):
            return signs.double(), middle.double()
        size //= 2
    return signs.double(), matrix.double() * signs.double()[:, None]
