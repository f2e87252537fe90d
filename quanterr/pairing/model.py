"""The data of a pairing: pairs of weights, leftover entries, and the results of a compared pair."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.checkpoints.labels import Labels
from quanterr.formats import Weight
from quanterr.formats.shared.scale_statistics import ScaleStatistics
from quanterr.lazy_torch import Tensor
from quanterr.metrics.attainable import Attainable
from quanterr.metrics.sums import Sums
from quanterr.pairing.sampling import InterpretationThreshold
from quanterr.tensors.casts import Copy
from quanterr.tensors.chunks import Chunk


class Bucket(StrEnum):
    """The outcome for an entry of a checkpoint; each entry has exactly one."""

    COMPARED = "compared"
    LOSSLESS = "lossless"
    CONSUMED = "consumed"  # a scale or another part of a compared weight, or a label
    NON_FINITE = "non_finite"  # compared, but with NaN or infinity
    SHAPE_MISMATCH = "shape_mismatch"
    ONLY_IN_ORIGINAL = "only_in_original"
    ONLY_IN_QUANTIZED = "only_in_quantized"
    UNSUPPORTED = "unsupported"
    ERROR = "error"
    NOT_REACHED = "not_reached"  # the run was interrupted first
    FILTERED_OUT = "filtered_out"


NOT_SELECTED = "not selected"
COMPUTED = "a computed buffer that holds the expected values"  # the reason given for a consumed leftover


class Leftover(Struct, frozen=True):
    """Entries that are not compared, and the reason."""

    name: str
    side: str
    bucket: Bucket
    reason: str
    entries: tuple[Entry, ...]


class Contradiction(NamedTuple):
    """The interpretation of a weight that a convention prescribes, and another one that fits the original better."""

    prescribed: str  # the interpretation that is used, in words, with what prescribes it
    other: str  # the other interpretation
    prescribed_error: float = 0.0  # relative error on a sample
    other_error: float = 0.0


class Alternative(Struct, frozen=True):
    """Weights that replace the weights of a pair if a sample of values fits them better.

    If a convention prescribes the first interpretation, the pair keeps it and gets the contradiction.
    """

    original: Weight
    quantized: Weight | None  # None: the pair's quantized weight
    bar: InterpretationThreshold
    contradiction: Contradiction | None = None  # None: nothing prescribes one
    evidence: str = ""  # evidence to add to the pair if the alternative wins; {error} is the relative error
    warning: str = ""  # warning to add in the same case; {error} as above
    leftovers: tuple[Leftover, ...] = ()  # replace the pair if the alternative fits better, which is an error here


class Pair(Struct, frozen=True, gc=False):
    """One weight as stored on both sides; ``name`` is its name in the original."""

    name: str
    original: Weight
    quantized: Weight
    # Entries that hold the elements, and all other entries of the weight.
    original_codes: tuple[Entry, ...]
    quantized_codes: tuple[Entry, ...]
    original_consumed: tuple[Entry, ...]
    quantized_consumed: tuple[Entry, ...]
    alternatives: tuple[Alternative, ...] = ()
    contradiction: Contradiction | None = None
    importance: Callable[[Chunk], Tensor] | None = None  # chunk → importance of its elements, (1 or r, c)

    @property
    def codes(self) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """Per side: the entries that hold the elements."""
        return self.original_codes, self.quantized_codes

    @property
    def other_entries(self) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """Per side: all other entries of the weight."""
        return self.original_consumed, self.quantized_consumed

    def leave(self, bucket: Bucket, reason: str) -> tuple[Leftover, ...]:
        """Return the leftovers of a pair that, as a later step shows, cannot be compared."""
        original = Leftover(self.name, "original", bucket, reason, (*self.original_codes, *self.original_consumed))
        first, *others = [Leftover(entry.name, "quantized", bucket, reason, (entry,)) for entry in self.quantized_codes]
        return original, replace(first, entries=(*first.entries, *self.quantized_consumed)), *others


class FoldedScales(Struct, frozen=True):
    """Factors that a quantizer moved from weights into the norm or weight before them, and that were moved back."""

    source: str  # name of the norm or weight that absorbed the factors
    names: tuple[str, ...]  # names of the weights that were corrected
    worst: str = ""  # name of the weight with the largest error as stored
    before_db: float = 0.0  # SNR of ``worst`` on a sample, as stored
    after_db: float = 0.0  # SNR of ``worst`` with all factors undone
    without: tuple[str, ...] = ()  # names of weights that this norm feeds too, but whose columns lack the factors
    bias: str = ""  # name of the source's bias, if the factors of the source's rows were not applied to it
    unlike: tuple[int, ...] = ()  # rows of the source whose factor differs from that of the columns that they feed
    # Name of the weight whose factors are in another order of heads than the configuration declares.
    misplaced: str = ""


class KeyHeads(NamedTuple):
    """The declared number of key and value heads, and the number of elements of a value head."""

    number: int
    size: int


class ImportanceCoverage(NamedTuple):
    """How far an importance matrix covers a weight: how many of its matrices have count 0; None if it is not listed."""

    name: str
    uncovered: int | None


class Pairing(Struct, frozen=True):
    """The result of pairing: the pairs to compare, and the leftovers."""

    pairs: Sequence[Pair] = ()
    leftovers: Sequence[Leftover] = ()
    prefixes: Mapping[str, str] = field(default_factory=dict)  # side → prefix stripped from its names
    labels: Mapping[str, Labels] = field(default_factory=dict)
    folded: Sequence[FoldedScales] = ()
    reordered: Sequence[str] = ()  # routers whose rows were reordered together with the experts, which was undone
    key_heads: KeyHeads | None = None
    covered: Sequence[ImportanceCoverage] | None = None  # coverage by the importance matrix, if one was given
    idle: Sequence[str] = ()  # messages about excluding patterns that match nothing

    @property
    def names_with_unused_scale(self) -> list[str]:
        """Names of weights that are stored as plain floats and have a scale, which their format does not use."""
        plain = [pair for pair in self.pairs if pair.quantized.encoding == "floats" and pair.quantized_consumed]
        return [pair.name for pair in plain if "scale" not in pair.quantized.parts]


class LargestError(NamedTuple):
    """The element of a weight with the largest error."""

    row: int
    col: int
    x: float
    y: float


class WeightResult(NamedTuple):
    """The result of comparing pair ``number`` of a pairing; it is exact, so it can be stored and sent unchanged."""

    number: int
    sums: Sums
    scales: ScaleStatistics | None
    worst: LargestError | None
    attainable: Attainable | None = None  # None if the nearest codes are unknown
    copy: Copy | None = None  # how far values are a copy of the original; None if a side is quantized
    fingerprint: str | None = None  # checksum of sampled bytes of the original
