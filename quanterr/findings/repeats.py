"""Experts and layers that repeat each other on both sides, which a comparison of the sides cannot show.

Matrices with equal energies are sampled again. Only values of the original are read: if the quantized checkpoint has
about these values, it repeats them too, however each copy was rounded.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

from quanterr.documents.base import Finding
from quanterr.findings.codes import make_finding
from quanterr.findings.constants import is_kept
from quanterr.findings.limits import MIN_VALUES
from quanterr.formats import Weight
from quanterr.formats.reading import Reader
from quanterr.metrics.sums import Sums, as_float
from quanterr.pairing.model import Pair
from quanterr.selection.roles import block_of, role_of, unify_numbers
from quanterr.tensors.chunks import Chunk
from quanterr.util.text import count, itemize

# Largest relative difference of equal energies: chunks cut equal experts of a stack differently, and parts of a sum may
# be float32 for one expert and float64 for the other, as their errors decide.
ENERGY_TOLERANCE = 1e-6
SAMPLE_ELEMENTS = 1 << 16  # maximum number of elements of a matrix to compare
SHARED_NAMES = re.compile(r"embed|(?:\b|_)head\b")  # names of weights that several layers may share

Energies = list[tuple[float, int]]  # Σx² of matrices, and their numbers


class _Stack(NamedTuple):
    """A stack in which some experts repeat others."""

    pair: Pair
    experts: int
    distinct: int


class RepeatedWeights:
    """Collector of the energies of learned matrices, which finds matrices that repeat each other."""

    def __init__(self, alone: bool = False) -> None:
        """Start without matrices; with ``alone``, both sides are the same checkpoint, inspected by itself."""
        self._alone = alone
        self._pairs: dict[int, Pair] = {}
        self._energies: dict[tuple[str, tuple[int, ...]], Energies] = defaultdict(list)
        self._stacks: dict[int, tuple[int, list[list[int]]]] = {}  # number → experts, and groups of equal energy

    def add(self, number: int, pair: Pair, sums: Sums) -> None:
        """Add a learned matrix, or a stack of them."""
        pattern, x = unify_numbers(pair.name), pair.original
        if not is_kept(sums) or x.n < MIN_VALUES or SHARED_NAMES.search(pattern):
            return
        self._pairs[number] = pair
        self._energies[pattern, x.shape].append((as_float(sums.x_sq), number))
        if x.matrix_rows * x.matrix[1] >= MIN_VALUES and role_of(pattern) == "experts":
            energies = [(as_float(row_sums.x_sq), n) for n, row_sums in sums.matrices.items() if is_kept(row_sums)]
            if equal := list(_group_equal_energies(energies)):
                self._stacks[number] = len(sums.matrices), equal

    def findings(self, reader: Reader) -> Iterator[Finding]:
        """Report experts and layers that repeat each other."""
        groups = list(self._confirm_weights(reader))
        stacks = list(self._confirm_stacks(reader))
        experts = [group for group in map(_keep_experts, groups) if group]
        layers = [layer_group for layer_group in groups if not _keep_experts(layer_group)]
        labels = [
            *map(_make_label, experts),
            *(f"{stack.pair.name} ({stack.distinct} of {stack.experts} distinct)" for stack in stacks),
        ]
        if labels:
            remedy = (
                f"compare the {'checkpoint' if self._alone else 'original'} with the one from which it was converted: "
                "experts were written to the wrong places, unless they were copied on purpose and not trained since"
            )
            names = [pair.name for pair in (*chain(*experts), *(stack.pair for stack in stacks))]
            yield make_finding(
                "repeated_weights", "warning", None, _describe("experts", labels, self._alone), remedy, layers=names
            )
        if layers:
            remedy = "nothing if the model was merged from repeated layers; otherwise a converter wrote a layer twice"
            names = [pair.name for pair in chain(*layers)]
            message = _describe("layers", [*map(_make_label, layers)], self._alone)
            yield make_finding("repeated_weights", "info", None, message, remedy, layers=names)

    def _confirm_weights(self, reader: Reader) -> Iterator[list[Pair]]:
        """Return the groups of weights with equal samples, in the order of the pairing."""
        groups = []
        for energies in self._energies.values():
            for numbers in _group_equal_energies(energies):
                groups += _group_equal((n, _read_sample(self._pairs[n].original, reader)) for n in numbers)
        return ([self._pairs[number] for number in group] for group in sorted(groups))

    def _confirm_stacks(self, reader: Reader) -> Iterator[_Stack]:
        """Return the stacks with experts that have equal samples, in the order of the pairing."""
        for number, (experts, energies) in sorted(self._stacks.items()):
            pair, copies = self._pairs[number], 0
            for numbers in energies:
                groups = _group_equal((n, _read_sample(pair.original, reader, n)) for n in numbers)
                copies += sum(len(group) - 1 for group in groups)
            if copies:
                yield _Stack(pair, experts, experts - copies)


def _group_equal_energies(energies: Energies) -> Iterator[list[int]]:
    """Return groups of several numbers whose energies are equal."""
    group: list[int] = []
    last = 0.0
    for energy, number in sorted(energies):
        if energy > last * (1 + ENERGY_TOLERANCE):
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        last = energy
    if len(group) > 1:
        yield group


def _group_equal(samples: Iterable[tuple[int, bytes]]) -> list[list[int]]:
    """Return groups of several numbers whose samples are equal, each in ascending order."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for number, sample in samples:
        groups[sample].append(number)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def _read_sample(weight: Weight, reader: Reader, matrix: int = 0) -> bytes:
    """Return the SHA-256 of the first values of a weight, or of one matrix of a stack."""
    rows, cols = weight.matrix_rows or weight.matrix[0], min(weight.matrix[1], SAMPLE_ELEMENTS)
    first, n = matrix * rows, min(rows, SAMPLE_ELEMENTS // cols)
    values = reader.read(weight, Chunk(first, first + n, 0, cols))
    return sha256(values.contiguous().numpy().tobytes()).digest()


def _keep_experts(group: Sequence[Pair]) -> list[Pair]:
    """Return the experts of the group that repeat another expert of the same block."""
    blocks = [block_of(pair.name) for pair in group]
    same = zip(group, blocks, strict=True)
    return [pair for pair, block in same if blocks.count(block) > 1 and role_of(pair.name) == "experts"]


def _make_label(group: Sequence[Pair]) -> str:
    return f"{group[0].name} and {count(len(group) - 1, 'other')}"


def _describe(what: str, labels: Sequence[str], alone: bool) -> str:
    """Return the message about experts or layers."""
    where, hidden = ("", "") if alone else (" on both sides", ", which no error shows")
    evidence = "(the same energies, and the same values on a sample)"
    return f"{what} repeat each other{where} {evidence}{hidden}: {itemize(labels, 3)}"
