"""The interface of a recipe: how it measures a weight to derive scales, and how it stores the weight.

A weight is quantized in two passes over its rows: ``measure`` collects the numbers that scales are derived from, piece
by piece and in any order; ``settle`` derives all scales; ``encode`` writes the codes of any rows. So a weight need not
be in memory as a whole.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

from quanterr.kernel.rounding import find_magnitudes
from quanterr.lazy_torch import Tensor, torch

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # dtypes that can be quantized
# The dtype that weights of a stored dtype are quantized as. Rows are read in float32, and no format has float64 scales.
QUANTIZED_AS = {name: name for name in FLOATS} | {"F64": "F32"}

SMALLEST_GROUP = 16  # elements; larger groups are made up of such groups

Rows = Callable[[int, int], Tensor]  # returns rows first:stop of a weight, (r, c) float32


class Source(NamedTuple):
    """A weight to quantize."""

    rows: int
    cols: int
    dtype: str  # one of FLOATS


class Piece:
    """Rows of a weight, and the largest magnitudes of their groups, which are computed once for all recipes."""

    def __init__(self, rows: Tensor) -> None:
        """Start with rows, (r, c) float32."""
        self.rows = rows

    @cached_property
    def _finest(self) -> Tensor:
        return find_magnitudes(self.rows, SMALLEST_GROUP)

    def find_magnitudes(self, size: int) -> Tensor:
        """Return the largest magnitude of each run of ``size`` elements, row by row, (n,); the last may be shorter."""
        if size % SMALLEST_GROUP:
            return find_magnitudes(self.rows, size)
        return self._finest if size == SMALLEST_GROUP else find_magnitudes(self._finest, size // SMALLEST_GROUP)


class StoredTensor(NamedTuple):
    """A tensor that a recipe stores for a weight X.weight."""

    name: str  # {weight} stands for X.weight, {module} for X
    dtype: str  # name in a safetensors header or in ggml
    shape: tuple[int, ...]


def explain_partial_groups(source: Source, group: int) -> str | None:
    """Explain why columns cannot be stored in groups of ``group``; None if they can."""
    return f"its {source.cols} columns are not a multiple of {group}" if source.cols % group else None


class Encoder(Protocol):
    """A way to store weights; the same object is used for all weights."""

    def explain_refusal(self, source: Source) -> str | None:
        """Explain why a weight of this shape cannot be stored in this way; None, the default, if it can."""
        return None

    def fallback(self, cols: int) -> "Recipe | None":
        """Return the recipe that replaces this one if rows of ``cols`` columns do not fill its blocks.

        None, the default, if they fill the blocks, or if nothing replaces the recipe.
        """
        return None

    def list_tensors(self, source: Source) -> tuple[StoredTensor, ...]:
        """List the tensors that are stored for a weight. The first holds the codes, row by row."""

    def joint_rows(self, source: Source) -> int:
        """Return the number of rows that are measured and encoded together; pieces begin at its multiples."""
        return 1

    def measure(self, piece: Piece, importance: Tensor | None = None) -> Tensor:
        """Return the numbers that scales are derived from; the results for pieces are joined along axis 0.

        ``importance`` of the columns, (c,) float32, is for calibrators that search.
        """

    def constant_tensors(self, source: Source) -> Mapping[str, Tensor]:
        """Return the stored tensors that do not depend on the weight's values, by name; by default none."""
        return {}

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """Derive all stored tensors except codes and constants, in order, from the measured numbers of all rows.

        Tensors that only ``encode`` needs may follow.
        """

    def encode(
        self, x: Tensor, first: int, settled: tuple[Tensor, ...], out: Tensor, importance: Tensor | None = None
    ) -> None:
        """Write the codes of rows from index ``first`` on, (r, c) float32, to ``out``, contiguous uint8 (bytes,).

        ``importance`` is as in ``measure``, for types that search their scales here.
        """

    @property
    def is_local(self) -> bool:
        """True, the default, if rows that are quantized together need nothing from other rows."""
        return True

    @property
    def config(self) -> Mapping[str, object]:
        """Entries that config.json needs so that loaders understand the tensors; usually none."""
        return {}


class Recipe(NamedTuple):
    """A name, and the encoder that it stands for."""

    name: str
    encoder: Encoder

    def for_columns(self, cols: int) -> "Recipe":
        """Return the recipe that really stores a weight of ``cols`` columns: this one, or its fallback."""
        return self.encoder.fallback(cols) or self


def find_extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number along the last axis; two passes are faster than torch.aminmax."""
    return groups.amin(-1), groups.amax(-1)


def view_bytes(values: Tensor) -> Tensor:
    """Return a tensor of rows viewed as bytes, uint8 (r, bytes)."""
    return values.contiguous().view(torch.uint8).view(values.shape[0], -1)
