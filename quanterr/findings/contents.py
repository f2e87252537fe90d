"""What checks are told: what is known of one checkpoint, of a comparison of two, and of a weight."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from quanterr.checkpoints import Checkpoint, Entry
from quanterr.checkpoints.labels import Labels
from quanterr.declarations import Scheme
from quanterr.documents.base import Finding
from quanterr.findings.methods import Method
from quanterr.formats import Weight, find_rows
from quanterr.formats.reading import Reader
from quanterr.pairing import SIDES
from quanterr.pairing.inputs import Inputs, find_declared_inputs
from quanterr.pairing.model import Leftover, Pair, Pairing, WeightResult


class Stored(NamedTuple):
    """A weight of the checkpoint whose configuration is checked."""

    name: str  # as reports call it: in a comparison the original's name
    weight: Weight
    parts: Sequence[Entry]  # entries beside the codes
    has_shape: bool = True  # False: its files do not show its shape, and no original does

    @property
    def is_left(self) -> bool:
        """Whether it is a matrix stored as plain numbers."""
        return self.weight.encoding == "floats" and len(self.weight.shape) == 2 and self.weight.name.endswith(".weight")


@dataclass(frozen=True)
class Contents:
    """A side of a comparison, or a checkpoint alone, whose weights are then paired with themselves."""

    checkpoint: Checkpoint
    pairing: Pairing
    side: str = "quantized"
    other: Checkpoint | None = None  # the other side; None for a checkpoint alone
    # What a pass over all values of a checkpoint alone showed.
    value_findings: Callable[[Reader], Iterable[Finding]] = lambda reader: ()
    reader: Reader = field(default_factory=Reader)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other side."""
        return self.other is None

    @property
    def whose(self) -> str:
        """The checkpoint, in messages: nothing for one alone, of which all messages are."""
        return "" if self.is_alone else f" of the {self.side} checkpoint"

    @property
    def number(self) -> int:
        """The number of the side: 0 for the original."""
        return SIDES.index(self.side)

    @property
    def labels(self) -> Labels:
        """What its files declare."""
        return self.pairing.labels[self.side]

    @property
    def leftovers(self) -> list[Leftover]:
        """Its entries that belong to no pair."""
        return [one for one in self.pairing.leftovers if one.side == self.side]

    @cached_property
    def stored(self) -> list[Stored]:
        """Its weights that were recognized; in a comparison those that have a counterpart."""
        weights = ((pair, (pair.original, pair.quantized)[self.number]) for pair in self.pairing.pairs)
        return [
            Stored(pair.name, weight, pair.consumed[self.number], not self.is_alone or _shows_shape(weight))
            for pair, weight in weights
        ]

    @cached_property
    def inputs(self) -> dict[str, Inputs]:
        """The declared roundings of inputs by names of weights; for the quantized side."""
        return find_declared_inputs(self.pairing, self.checkpoint.entries)


def _shows_shape(weight: Weight) -> bool:
    return not any(row.is_shaped_by_original for row in find_rows(weight.format))


@dataclass(frozen=True)
class Comparison:
    """A comparison when its report is put together."""

    pairing: Pairing
    original: Contents
    quantized: Contents
    alphas: Mapping[str, float] | None = None  # sensitivities by names of weights, if any were given
    weight_findings: Sequence[Finding] = ()  # about the errors of compared weights
    changed_vectors: Sequence[str] = field(default=())  # 1-D tensors that differ by more than a conversion rounds
    has_blocks: bool = True  # whether the report groups layers by blocks
    least_snr_db: float = 0.0  # of all weights that differ


class MeasuredWeight(NamedTuple):
    """A compared weight whose sides differ."""

    pair: Pair
    done: WeightResult
    method: Method  # of its quantization, as far as it is known
    scheme: Scheme | None  # that is declared for it
