"""The rotation of weights that PrismML's fork of llama.cpp declares in a GGUF file, undone in these weights.

    prism.hadamard.version      1
    .transform, .axis           normalized-sylvester-walsh-hadamard, input-last-dimension
    .block_size                 n, a power of two: columns that are rotated together
    .sign_mode                  identity, or explicit: a sign s for each column
    .sign_widths, .sign_values  signs of the columns of all weights with so many columns, end to end
    .weight_names               weights whose inputs are rotated while the model runs: x' = H (s · x)
    .inverse_weight_names       tables whose rows are rotated back after they are looked up

    stored row = H (s · w)      for a row w of the weight; H is Sylvester's matrix / sqrt(n) for each n columns

Reference: PrismML-Eng/llama.cpp (branch prism) src/llama-model.cpp, src/llama-graph.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.checkpoints import Checkpoint
from quanterr.checkpoints.gguf_file import read_all_values
from quanterr.checkpoints.gguf_metadata import Value
from quanterr.errors import CheckpointError, FormatMismatch
from quanterr.formats import Weight
from quanterr.formats.shared import hadamard
from quanterr.lazy_torch import Tensor, torch
from quanterr.pairing.transforms import view_without_rotation
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import display

KEY = "prism.hadamard."
DECLARED = {"version": 1, "transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}
FORMATS = ("gguf_pq2_0", "gguf_ptq1_0")  # types that only this fork writes, and only for rotated weights
UNDECLARED = (
    f"the file does not declare a rotation ({KEY}…), and weights of this type are stored rotated: without the keys, "
    "runtimes load it and compute nonsense"
)


@dataclass(frozen=True, slots=True)
class SignedHadamard:
    """A rotation of rows of ``n`` columns: each column by its sign, then each ``block`` columns by Sylvester's matrix.

    The methods change rows, (r, a multiple of n) float32 or float64, in place. Products are computed in float64.
    """

    n: int
    block: int
    signs: tuple[int, ...]  # empty: all are 1

    def apply(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Rotate inputs as the model does, or a weight as it is stored."""
        wide = rows.view(-1, self.n).double() * self._make_signs(workspace)
        return self._multiply(wide, torch.ones(self.n, dtype=torch.float64, device=workspace.device), rows)

    def undo(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Rotate back."""
        return self._multiply(rows.view(-1, self.n), self._make_signs(workspace), rows)

    apply_to_weight, undo_in_weight = apply, undo  # the matrix is orthogonal

    def _make_signs(self, workspace: Workspace) -> Tensor:
        return torch.tensor(self.signs or (1,), dtype=torch.float64, device=workspace.device).expand(self.n)

    def _multiply(self, source: Tensor, signs: Tensor, rows: Tensor) -> Tensor:
        ones = torch.ones(len(source), dtype=torch.float64, device=rows.device)
        product = hadamard.multiply(source, self.block, 1, (ones, signs / sqrt(self.block)), rows.dtype)
        return rows.copy_(product.view(rows.shape))


class DeclaredRotation(NamedTuple):
    """The rotation that a file declares, and the weights that have it."""

    block: int
    signs: Mapping[int, tuple[int, ...]]  # width of rows → signs; empty: all are 1
    weights: frozenset[str]  # stored names

    def undo(self, weight: Weight) -> Weight:
        """Return a weight with its rotation undone; weights that the file does not list are returned unchanged.

        Raises:
            FormatMismatch: the declared rotation does not fit the weight.
        """
        if weight.codes.name not in self.weights:
            return weight
        cols = weight.codes.shape[-1] if weight.codes.shape else 1
        if cols % self.block or (self.signs and cols not in self.signs):
            raise FormatMismatch(
                f"{KEY}… declares it rotated in blocks of {self.block} columns, with signs for rows of "
                f"{sorted(self.signs) or 'any width'}, but its rows have {cols}: convert the model again"
            )
        matrix = SignedHadamard(cols, self.block, self.signs.get(cols, ()))
        what = f"its rows are rotated in blocks of {self.block} ({KEY}…), which is undone"
        return view_without_rotation(weight, what, matrix)


def read_rotation(checkpoint: Checkpoint) -> DeclaredRotation | None:
    """Read the rotation that a GGUF file declares; None if it declares none.

    Raises:
        CheckpointError: a key is missing or has another value than this version of the keys allows.
    """
    if checkpoint.gguf is None or not any(key.startswith(KEY) for key in checkpoint.gguf.values):
        return None
    file = (checkpoint.source or checkpoint).files[0]
    values = {key.removeprefix(KEY): value for key, value in read_all_values(file).items() if key.startswith(KEY)}
    for name, expected in DECLARED.items():
        if values.get(name) != expected:
            raise _refuse(str(file), name, values, f"known is {expected}")
    block = values.get("block_size")
    if not isinstance(block, int) or block < 1 or block & (block - 1):
        raise _refuse(str(file), "block_size", values, "it should be a power of two")
    names = [values.get(f"{prefix}weight_names", ()) for prefix in ("", "inverse_")]
    weights = frozenset(str(name) for each in names if isinstance(each, tuple) for name in each)
    return DeclaredRotation(block, _read_signs(str(file), block, values), weights)


def _read_signs(file: str, block: int, values: Mapping[str, Value]) -> dict[int, tuple[int, ...]]:
    mode, widths, signs = (values.get(name) for name in ("sign_mode", "sign_widths", "sign_values"))
    if mode == "identity":
        return {}
    if mode != "explicit":
        raise _refuse(file, "sign_mode", values, "known are identity and explicit")
    sizes = [n for n in widths if isinstance(n, int) and n > 0 and n % block == 0] if isinstance(widths, tuple) else []
    if not sizes or tuple(sizes) != widths:
        raise _refuse(file, "sign_widths", values, f"it should list multiples of {block}")
    if not isinstance(signs, tuple) or len(signs) != sum(sizes) or not set(signs) <= {1, -1}:
        raise _refuse(file, "sign_values", values, f"it should be {sum(sizes)} times 1 or -1")
    whole = [1 if sign == 1 else -1 for sign in signs]
    return {n: tuple(whole[end - n : end]) for n, end in zip(sizes, accumulate(sizes), strict=True)}


def _refuse(file: str, name: str, values: Mapping[str, Value], expected: str) -> CheckpointError:
    value_text = display(str(values[name])) if name in values else "missing"
    return CheckpointError(f"{file}: key {KEY}{name} is {value_text}; {expected}")


def warn_of_undeclared(weight: Weight) -> Weight:
    """Return a weight of a type that is always stored rotated, in a file that declares no rotation, with a warning."""
    return replace(weight, warnings=(UNDECLARED, *weight.warnings)) if weight.format in FORMATS else weight
