"""The arguments of checks: the contents of one checkpoint, a comparison of two, and a compared weight."""

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

    name: str  # its name in reports; in a comparison, the original's name
    weight: Weight
    parts: Sequence[Entry]  # entries beside the codes
    has_shape: bool = True  # False if only an original could show its shape, and there is none

    @property
    def is_left(self) -> bool:
        """Whether the weight is a matrix that is not quantized."""
        return self.weight.encoding == "floats" and len(self.weight.shape) == 2 and self.weight.name.endswith(".weight")


@dataclass(frozen=True)
class Contents:
    """A side of a comparison, or a checkpoint alone, whose weights are then paired with themselves."""

    checkpoint: Checkpoint
    pairing: Pairing
    side: str = "quantized"
    other: Checkpoint | None = None  # the other side; None for a checkpoint alone
    # Returns the findings of a pass over all values of a checkpoint alone.
    value_findings: Callable[[Reader], Iterable[Finding]] = lambda reader: ()
    reader: Reader = field(default_factory=Reader)

    @property
    def is_alone(self) -> bool:
        """Whether the checkpoint is checked alone, without another side."""
        return self.other is None

    @property
    def whose(self) -> str:
        """The words that name the side in messages; empty for a checkpoint alone, which all messages are about."""
        return "" if self.is_alone else f" of the {self.side} checkpoint"

    @property
    def number(self) -> int:
        """The number of the side: 0 for the original."""
        return SIDES.index(self.side)

    @property
    def labels(self) -> Labels:
        """The labels that its files declare."""
        return self.pairing.labels[self.side]

    @property
    def leftovers(self) -> list[Leftover]:
        """Its entries that belong to no pair."""
        return [leftover for leftover in self.pairing.leftovers if leftover.side == self.side]

    @cached_property
    def weights(self) -> list[Stored]:
        """Its recognized weights; in a comparison only those that have a counterpart."""
        weights = ((pair, (pair.original, pair.quantized)[self.number]) for pair in self.pairing.pairs)
        return [
            Stored(pair.name, weight, pair.other_entries[self.number], not self.is_alone or _shows_shape(weight))
            for pair, weight in weights
        ]

    @cached_property
    def inputs(self) -> dict[str, Inputs]:
        """The declared rounding of each weight's inputs, by the weight's name; only for the quantized side."""
        return find_declared_inputs(self.pairing, self.checkpoint.entries)


def _shows_shape(weight: Weight) -> bool:
    return not any(row.is_shaped_by_original for row in find_rows(weight.format))


@dataclass(frozen=True)
class Comparison:
    """A finished comparison, from which its report is put together."""

    pairing: Pairing
    original: Contents
    quantized: Contents
    alphas: Mapping[str, float] | None = None  # sensitivities by names of weights, if any were given
    weight_findings: Sequence[Finding] = ()  # findings about the errors of compared weights
    changed_vectors: Sequence[str] = field(default=())  # 1-D tensors that differ by more than a conversion rounds
    has_blocks: bool = True  # whether the report groups layers by blocks
    min_snr_db: float = 0.0  # lowest SNR of all weights that differ


class MeasuredWeight(NamedTuple):
    """A compared weight whose sides differ."""

    pair: Pair
    done: WeightResult
    method: Method  # the method of its quantization, as far as it is known
    scheme: Scheme | None  # the scheme that is declared for it
