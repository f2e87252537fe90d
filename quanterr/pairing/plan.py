"""What pairing decides: which weights are compared, which entries are left, and what a compared weight gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import Labels
from quanterr.formats import Weight
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums
from quanterr.pairing.sampling import Bar
from quanterr.tensors.casts import Copy
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
    NOT_REACHED = "not_reached"  # the run was interrupted before
    FILTERED_OUT = "filtered_out"


COMPUTED = "the model computes it, and these are its values"  # why a leftover is consumed


@dataclass(frozen=True, slots=True)
class Leftover:
    """Entries that are not compared, and why."""

    name: str
    side: str
    bucket: Bucket
    reason: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Other weights in place of those of a pair, if a sample of the values says so."""

    original: Weight
    quantized: Weight | None  # None: that of the pair
    bar: Bar
    evidence: str = ""  # what is then said of the pair; {error} is the relative error
    warning: str = ""  # the same, as a warning
    leftovers: tuple[Leftover, ...] = ()  # what then remains of the pair, where the alternative is an error


@dataclass(frozen=True, slots=True)
class Pair:
    """A weight as both sides store it; ``name`` is the original's."""

    name: str
    original: Weight
    quantized: Weight
    codes: tuple[tuple[Entry, ...], tuple[Entry, ...]]  # of each side: what holds its elements
    consumed: tuple[tuple[Entry, ...], tuple[Entry, ...]]  # of each side: what else belongs to it
    alternative: Alternative | None = None
    importance: Callable[[Chunk], Tensor] | None = None  # of the elements of a chunk, (1 or r, c)

    def left(self, bucket: Bucket, reason: str) -> tuple[Leftover, ...]:
        """What remains of it where it cannot be compared after all."""
        original = Leftover(self.name, "original", bucket, reason, (*self.codes[0], *self.consumed[0]))
        first, *others = [Leftover(entry.name, "quantized", bucket, reason, (entry,)) for entry in self.codes[1]]
        return original, replace(first, entries=(*first.entries, *self.consumed[1])), *others


@dataclass(frozen=True, slots=True)
class Folded:
    """Factors that a quantizer moved from weights into what comes before them, and that were undone."""

    source: str  # name of the norm or weight that took them up
    names: tuple[str, ...]  # of the weights
    worst: str = ""  # name of the weight that is farthest off as it is stored
    before_db: float = 0.0  # its SNR on a sample, as stored
    after_db: float = 0.0  # the same with all factors undone
    without: tuple[str, ...] = ()  # names of weights that should have the factors as well, and clearly do not
    bias: str = ""  # name of the source's bias, if it should have the factors of its rows as well, and does not


class Covered(NamedTuple):
    """Whether an importance matrix names a weight: matrices of it that were never counted; None: not in the file."""

    name: str
    uncovered: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be compared, and what not."""

    pairs: Sequence[Pair] = ()
    leftovers: Sequence[Leftover] = ()
    prefixes: Mapping[str, str] = field(default_factory=dict)  # side → the prefix that was stripped from its names
    labels: Mapping[str, Labels] = field(default_factory=dict)
    folded: Sequence[Folded] = ()
    covered: Sequence[Covered] | None = None  # by an importance matrix, where one was given
    idle: Sequence[str] = ()  # what is said of patterns that leave out nothing

    @property
    def dummies(self) -> list[str]:
        """Weights with a scale that scales nothing."""
        return [pair.name for pair in self.pairs if pair.quantized.encoding == "floats" and pair.consumed[1]]


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
    scales: ScaleStatistics | None
    worst: Element | None
    attainable: Attainable | None = None  # with its scales; None where that cannot be told
    copy: Copy | None = None  # of the original's, of what is not quantized on either side
    fingerprint: str | None = None  # of some bytes of the original
