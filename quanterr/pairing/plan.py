"""What pairing decides: which weights are compared, which entries are left, and what a compared weight gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import Labels
from quanterr.formats import Weight
from quanterr.formats.shared.scale_statistics import Scales
from quanterr.metrics.sums import Sums
from quanterr.tensors.chunks import Chunk


class Bucket(StrEnum):
    """Where an entry of a checkpoint ends: in exactly one of these."""

    COMPARED = "compared"
    LOSSLESS = "lossless"
    CONSUMED = "consumed"  # a scale or another part of a compared weight, or a label
    NON_FINITE = "non_finite"  # compared, but NaN or infinity was found
    SHAPE_MISMATCH = "shape_mismatch"
    ONLY_IN_ORIGINAL = "only_in_original"
    ONLY_IN_QUANTIZED = "only_in_quantized"
    UNSUPPORTED = "unsupported"
    ERROR = "error"
    FILTERED_OUT = "filtered_out"


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight as both sides store it; ``name`` is the original's."""

    name: str
    original: Weight
    quantized: Weight
    codes: tuple[tuple[Entry, ...], tuple[Entry, ...]]  # of each side: what holds its elements
    consumed: tuple[tuple[Entry, ...], tuple[Entry, ...]]  # of each side: what else belongs to it
    importance: Callable[[Chunk], Tensor] | None = None  # of the elements of a chunk, (1 or r, c)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Entries that are not compared, and why."""

    name: str
    side: str
    bucket: Bucket
    reason: str
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Plan:
    """What will be compared, and what not."""

    pairs: list[Pair] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    prefixes: dict[str, str] = field(default_factory=dict)  # side → the prefix taken from its names
    labels: dict[str, Labels] = field(default_factory=dict)
    dummies: list[str] = field(default_factory=list)  # weights with a scale that scales nothing


class Element(NamedTuple):
    """The element of a weight with the largest error."""

    row: int
    col: int
    x: float
    y: float


class ComparedWeight(NamedTuple):
    """A compared pair."""

    number: int
    sums: Sums
    scales: Scales | None
    worst: Element | None
