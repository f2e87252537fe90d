"""Weights of the original that the quantized checkpoint stores under other names, fused, split or stacked.

Only unique matches count: where two weights could hold the same projection neither is taken.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from quanterr.errors import FormatMismatch
from quanterr.formats import Weight
from quanterr.formats.base import FUSED
from quanterr.pairing.names import CONVENTIONS, Atoms, atoms_of, has_equal_parts, other_arrangements
from quanterr.pairing.side import Side
from quanterr.pairing.views import added, flipped, interleaved_halves, reshaped, rows_of, scaled, side_by_side, stacked
from quanterr.tensors.workspace import TORCH_DTYPES
from quanterr.util.text import display, listed

Shape = tuple[int, ...]
Naming = Callable[[int, str, Shape], Atoms]  # (0 for the original, 1 for the quantized; name; shape) → what it holds

INTERLEAVED_GATE_UP = frozenset().union(*(row.interleaved_gate_up for row in CONVENTIONS))


class Held(NamedTuple):
    """A weight of the original as the quantized checkpoint has it, and the names of the weights that hold it there."""

    weight: Weight
    holders: tuple[str, ...]


class Holders:
    """Finds what holds a weight of the original among those of the quantized checkpoint that no name claims."""

    def __init__(
        self, quantized: Side, naming: Naming, originals: Mapping[str, Shape], alone: Iterable[str], free: Iterable[str]
    ) -> None:
        """From the shapes of all originals, those ``alone`` without a partner, and such quantized weights."""
        self._quantized, self._naming = quantized, naming
        self._sizes = _sizes(originals, naming)  # atom → its shape in the original, where one shape gives it
        self._atoms: dict[str, Atoms] = {}  # quantized weight → what it holds
        self._holders: dict[str, list[str]] = {}  # atom → quantized weights
        self._claims: dict[str, list[str]] = {}  # atom → weights of the original that want it
        self.used: set[str] = set()  # quantized weights
        for name in alone:
            for atom in naming(0, name, originals[name]).names:
                self._claims.setdefault(atom, []).append(name)
        for name in free:
            shape = quantized.codes[name].shape
            self._atoms[name] = atoms = naming(1, name, (*shape[:1], 1, 1) if len(shape) > 2 else shape)
            for atom in atoms.names:
                self._holders.setdefault(atom, []).append(name)

    def find(self, name: str, shape: Shape) -> Held | None:
        """The weight of that name and shape; None where the quantized checkpoint holds no such thing.

        The result may have its last two axes swapped.

        Raises:
            FormatMismatch: two weights could hold it, or it may belong to another weight of the original; what holds
                it cannot be read or has another shape.
        """
        arrange = {"rows": self._in_rows, "columns": self._in_columns, "heads": self._in_heads}
        for wanted in (*other_arrangements(name), self._naming(0, name, shape)):
            if holders := self._holding(wanted.names):
                weight = arrange[wanted.axis](name, wanted, holders, shape)
                self.used.update(holders)
                return Held(weight, tuple(dict.fromkeys(holders)))
        return None

    def _holding(self, atoms: Sequence[str]) -> list[str]:
        """What holds each of the atoms; empty where nothing holds any."""
        found = [self._holders.get(atom, []) for atom in atoms]
        for atom, holders in zip(atoms, found, strict=True):
            if len(holders) > 1:
                raise FormatMismatch(f"two weights could hold it: {display(holders[0])} and {display(holders[1])}")
            if not holders and any(found):
                raise FormatMismatch(f"only a part of it is stored: no tensor holds {display(atom)}")
            claims = self._claims.get(atom, [])
            if holders and len(claims) > 1:
                raise FormatMismatch(
                    f"{display(holders[0])} may be {display(claims[0])} or {display(claims[1])} of the original"
                )
        return [holders[0] for holders in found if holders]

    def _in_rows(self, name: str, wanted: Atoms, holders: list[str], shape: Shape) -> Weight:
        """The atoms' weights on top of each other, of that shape or with its last two axes swapped."""
        problem: FormatMismatch | None = None
        for transpose in (False, True):
            try:
                weight = self._stacked(wanted, holders, swapped(shape) if transpose else shape, transpose)
            except FormatMismatch as mismatch:
                problem = problem or mismatch
                continue
            apart = has_equal_parts(name) and set(holders[::2]).isdisjoint(holders[1::2])
            return self._gate_and_up(weight, wanted.are_biases) if apart else weight
        raise problem or AssertionError

    def _gate_and_up(self, weight: Weight, are_biases: bool) -> Weight:
        """Gate and up that the quantized checkpoint stores apart: where they are fused, their rows may alternate."""
        run = weight.shape[-1 if are_biases else -2]
        if run % 2:
            return weight
        alternate = interleaved_halves(weight, run)
        alternate = replace(alternate, evidence=("rows of gate and up alternating", *alternate.evidence))
        below = replace(weight, evidence=("rows of gate, then those of up", *weight.evidence))
        config = self._quantized.checkpoint.config.get("config.json")
        known = isinstance(config, dict) and config.get("model_type") in INTERLEAVED_GATE_UP
        first, second = (alternate, below) if known else (below, alternate)
        return first.with_alternatives((*first.alternatives, replace(second, alternatives=())))

    def _stacked(self, wanted: Atoms, holders: list[str], shape: Shape, transpose: bool) -> Weight:
        pieces = []
        for holder, run in groupby(zip(holders, wanted.names, strict=True), key=lambda pair: pair[0]):
            pieces.append(self._piece(holder, [atom for _, atom in run], wanted, shape, transpose))
        if wanted.are_biases and len(shape) == 2 and len(wanted.names) > shape[0]:
            pieces = _bias_rows(pieces, shape)
        long = len(shape) > 1 and any(piece.shape[-1] != shape[-1] for piece in pieces)
        if long or sum(prod(piece.shape) for piece in pieces) != prod(shape):
            shapes = " + ".join(str(list(piece.shape)) for piece in pieces[:4])
            raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} in {display(holders[0])}")
        return stacked(pieces, shape)

    def _piece(self, holder: str, atoms: list[str], wanted: Atoms, shape: Shape, transpose: bool) -> Weight:
        """Neighbouring atoms of one quantized weight."""
        held = self._atoms[holder]
        whole = self._quantized.recognized(holder, self._expected(holder, held, wanted, shape, transpose))
        if FUSED in whole.parts:
            whole = self._with_factors(held, whole)
        if list(held.names) == atoms:
            return whole
        first = held.names.index(atoms[0])
        if list(held.names[first : first + len(atoms)]) != atoms:
            raise FormatMismatch(f"{display(holder)} holds its parts in another order")
        rows = self._rows(held, whole)
        begin, end = sum(rows[:first]), sum(rows[: first + len(atoms)])
        return rows_of(whole, begin, (end - begin, *whole.shape[-1:]) if len(whole.shape) > 1 else (end - begin,))

    def _with_factors(self, held: Atoms, whole: Weight) -> Weight:
        """A weight of several layers, of which each has a factor of its own."""
        entry, rows = whole.parts[FUSED], self._rows(held, whole)
        if entry.n != len(rows):
            raise FormatMismatch(
                f"{entry} should have a number for each of {len(rows)} layers: {listed(list(held.names))}"
            )
        stored = torch.frombuffer(bytearray(entry.read()), dtype=TORCH_DTYPES[entry.dtype]).float()
        description = f"rows of {len(rows)} layers times {entry.name.rpartition('.')[2]}"
        factored = scaled(whole, stored.repeat_interleave(torch.tensor(rows)), 0)
        return replace(factored, refusal=None, evidence=(*factored.evidence, description))

    def _rows(self, held: Atoms, whole: Weight) -> list[int]:
        """Rows of each atom of a weight."""
        total = whole.shape[0] if len(whole.shape) == 1 else whole.matrix[0]
        known = [self._sizes.get(atom) for atom in held.names]
        if all(known):
            rows = [size[0] for size in known if size]
            if sum(rows) == total:
                return rows
        if held.equal and total % len(held.names) == 0:
            return [total // len(held.names)] * len(held.names)
        raise FormatMismatch(
            f"the rows of {display(whole.name)} that hold it cannot be inferred from the shapes of the original"
        )

    def _expected(self, holder: str, held: Atoms, wanted: Atoms, shape: Shape, transpose: bool) -> Shape | None:
        """The shape that a quantized weight should have, as far as the original gives it."""
        if held.names == wanted.names and len(self._quantized.codes[holder].shape) < 3:
            return shape
        sizes = [self._sizes.get(atom) for atom in held.names]
        if not all(sizes):
            return shape if held.names == wanted.names else None
        known = [swapped(size) if transpose else size for size in sizes if size]
        rows = sum(size[0] for size in known)
        if len(self._quantized.codes[holder].shape) > 2:
            stack = self._quantized.codes[holder].shape[0]
            return stack, rows // stack, *known[0][1:]
        return rows, *known[0][1:]

    def _in_heads(self, _name: str, _wanted: Atoms, holders: list[str], shape: Shape) -> Weight:
        """The rows of each head, the first of which MLX stores as a stack of its own, [heads, cols, rows]."""
        first, rest = (self._quantized.recognized(holder) for holder in holders)
        shapes = f"shape {list(shape)} in the original, {list(first.shape)} and {list(rest.shape)} in the quantized"
        if {len(first.shape), len(rest.shape)} != {3} or first.shape[0] != rest.shape[0]:
            raise FormatMismatch(shapes)
        if any(weight.matrix[1] != weight.shape[2] for weight in (first, rest)):  # taken for a convolution
            raise FormatMismatch(f"{shapes}: heads with so few columns are not supported")
        first = flipped(first)
        n, rows, cols = first.shape
        more = rest.shape[1]
        if (n * (rows + more), cols) != shape or rest.shape[2] != cols:
            raise FormatMismatch(shapes)
        pieces = [rows_of(w, head * r, (r, cols)) for head in range(n) for w, r in ((first, rows), (rest, more))]
        return stacked(pieces, shape)

    def _in_columns(self, _name: str, wanted: Atoms, holders: list[str], shape: Shape) -> Weight:
        """Matrices next to each other; of biases, each has one and the layer adds them."""
        if wanted.are_biases:
            biases = [self._quantized.recognized(holder, shape) for holder in holders]
            if any(bias.shape != shape for bias in biases):
                shapes = " + ".join(str(list(bias.shape)) for bias in biases)
                raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} in the quantized")
            return added(biases)
        weights = [self._quantized.recognized(holder) for holder in holders]
        if sum(weight.shape[-1] for weight in weights) != shape[-1]:
            shapes = " + ".join(str(list(weight.shape)) for weight in weights)
            raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} next to each other in the quantized")
        return side_by_side(weights, shape)


def _bias_rows(biases: list[Weight], shape: Shape) -> list[Weight]:
    """Biases of gate and up of one expert after the other, each as the row that it is in the fused ones."""
    many = len(biases) // shape[0]
    rows = [biases[n : n + many] for n in range(0, len(biases), many)]
    return [
        side_by_side([reshaped(bias, (1, bias.n)) for bias in row], (1, sum(bias.n for bias in row))) for row in rows
    ]


def swapped(shape: Shape) -> Shape:
    """The shape with its last two axes swapped."""
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape


def plain_naming(_side: int, name: str, shape: Shape) -> Atoms:
    """The naming of two checkpoints neither of which has names of its own kind."""
    return atoms_of(name, shape)


def _sizes(originals: Mapping[str, Shape], naming: Naming) -> dict[str, Shape]:
    """Shapes of single atoms; of those that two originals hold, none."""
    sizes: dict[str, Shape] = {}
    twice = set()
    for name, shape in originals.items():
        atoms = naming(0, name, shape)
        if not atoms.equal or not shape:
            continue
        rows = prod(shape[:-1]) if len(shape) == 3 and len(atoms.names) > 1 else shape[0]
        for atom in atoms.names:
            if atom in sizes:
                twice.add(atom)
            if len(shape) == 2 and atom.endswith(".bias") and len(atoms.names) > 1:
                sizes[atom] = (prod(shape) // len(atoms.names),)
            else:
                sizes[atom] = (rows // len(atoms.names), *shape[1:][-1:]) if len(atoms.names) > 1 else shape
    return {atom: shape for atom, shape in sizes.items() if atom not in twice}
