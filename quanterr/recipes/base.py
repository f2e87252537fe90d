"""What a recipe is: how a weight is measured, and what is then stored of it.

A weight is quantized in two passes over its rows: ``measure`` finds what scales are made of, in pieces and in any
order; ``settle`` makes all scales of it; ``encode`` gives the codes of any rows. So no weight is ever in memory whole.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # dtypes that can be quantized

Rows = Callable[[int, int], Tensor]  # rows first:stop of a weight, (r, c) float32


class Source(NamedTuple):
    """A weight that is to be quantized."""

    rows: int
    cols: int
    dtype: str  # one of FLOATS


class Stored(NamedTuple):
    """A tensor that a recipe stores of a weight X.weight."""

    name: str  # {weight} stands for X.weight, {module} for X
    dtype: str  # as a safetensors header or ggml names it
    shape: tuple[int, ...]


def not_whole(source: Source, group: int) -> str | None:
    """Why columns cannot be stored in groups of so many; None if they can."""
    return f"its {source.cols} columns are not a multiple of {group}" if source.cols % group else None


class Scheme(Protocol):
    """A way to store weights; one object for all weights."""

    def refusal(self, source: Source) -> str | None:
        """Why a weight of that shape cannot be stored like this; None if it can: any, if nothing else is said."""
        return None

    def fallback(self, cols: int) -> "Recipe | None":
        """Return the recipe that replaces this one where rows of so many columns do not fill its blocks.

        None where they do, or where nothing replaces it.
        """
        return None

    def stored(self, source: Source) -> tuple[Stored, ...]:
        """What is stored of it. The first holds the codes, row by row."""

    def together(self, source: Source) -> int:
        """Rows that are measured and encoded together: pieces begin at multiples of them. 1: rows stand alone."""
        return 1

    def measure(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """What scales of rows, (r, c) float32, are made of; pieces are put together along the first axis.

        ``importance`` is that of the columns, (c,) float32, for calibrators that search.
        """

    def known(self, source: Source) -> Mapping[str, Tensor]:
        """By name what is stored whatever the weight holds: shapes, tables; nothing, if nothing else is said."""
        return {}

    def settle(self, measured: Tensor, source: Source) -> tuple[Tensor, ...]:
        """All else that is stored of the weight but its codes, in order, from the measures of all its rows.

        What only ``encode`` needs may follow.
        """

    def encode(self, x: Tensor, first: int, settled: tuple[Tensor, ...], importance: Tensor | None = None) -> Tensor:
        """The codes of rows from number ``first`` on, (r, c) float32, as uint8 (r, bytes of a row).

        ``importance`` is as of ``measure``, for types that search their scales here.
        """

    @property
    def is_local(self) -> bool:
        """Whether rows that are quantized together need nothing of other rows; so, if nothing else is said."""
        return True

    @property
    def config(self) -> Mapping[str, object]:
        """What config.json has to say of a checkpoint like this; empty where the tensors say it all, as for most."""
        return {}


class Recipe(NamedTuple):
    """A scheme under its name."""

    name: str
    scheme: Scheme

    def for_columns(self, cols: int) -> "Recipe":
        """Return the recipe that really stores a weight of so many columns: this one, or its fallback."""
        return self.scheme.fallback(cols) or self


def bytes_of(values: Tensor) -> Tensor:
    """The bytes of a tensor of rows, uint8 (r, bytes)."""
    return values.contiguous().view(torch.uint8).view(values.shape[0], -1)
