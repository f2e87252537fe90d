"""Weights of the original that the quantized checkpoint stores under other names, fused, split or stacked.

Only unique matches count: where two weights could hold the same projection neither is taken.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod

import torch

from quanterr.errors import FormatMismatch
from quanterr.formats import Weight
from quanterr.formats.base import FUSED
from quanterr.pairing.names import INTERLEAVED_GATE_UP, Atoms, atoms_of, columns_of, heads_of, in_halves, is_bias
from quanterr.pairing.side import Side
from quanterr.pairing.views import added, flipped, interleaved_halves, reshaped, rows_of, scaled, side_by_side, stacked
from quanterr.tensors.workspace import TORCH_DTYPES
from quanterr.util.text import display, listed

Shape = tuple[int, ...]
Naming = Callable[[int, str, Shape], Atoms]


@dataclass(slots=True)
class Composer:
    """Makes weights of the original out of those of the quantized checkpoint that no other name claims."""

    quantized: Side
    naming: Naming  # (0 for the original, 1 for the quantized; name; shape) → what it holds
    sizes: dict[str, Shape]  # atom → its shape in the original, where one shape tells it
    atoms: dict[str, Atoms] = field(default_factory=dict)  # own name → what it holds
    holders: dict[str, list[str]] = field(default_factory=dict)  # atom → own names
    claims: dict[str, list[str]] = field(default_factory=dict)  # atom → weights of the original that want it
    used: set[str] = field(default_factory=set)  # own names

    @classmethod
    def of(
        cls,
        originals: Mapping[str, Shape],
        alone: Iterable[str],
        quantized: Side,
        free: Iterable[str],
        naming: Naming,
    ) -> "Composer":
        """From the shapes of all originals, those ``alone`` without a partner, and such quantized weights."""
        composer = cls(quantized, naming, _sizes(originals, naming))
        for name in alone:
            for atom in naming(0, name, originals[name]).names:
                composer.claims.setdefault(atom, []).append(name)
        for name in free:
            codes = quantized.codes[name]
            atoms = naming(1, name, (*codes.shape[:1], 1, 1) if len(codes.shape) > 2 else codes.shape)
            composer.atoms[name] = atoms
            for atom in atoms.names:
                composer.holders.setdefault(atom, []).append(name)
        return composer

    def compose(self, name: str, shape: Shape) -> Weight | None:
        """The weight of that name and shape; None where the quantized checkpoint holds no such thing.

        The result may have its last two axes swapped.

        Raises:
            FormatMismatch: two weights could hold it, or it may belong to another weight of the original; what holds it
                cannot be read or has another shape.
        """
        if columns := columns_of(name):
            return self._side_by_side(columns, shape)
        if (heads := heads_of(name)) and (weight := self._by_head(heads, shape)):
            return weight
        wanted = self.naming(0, name, shape).names
        found = self._holders(wanted)
        if not found:
            return None
        self._check_claims(wanted, found)
        problem: FormatMismatch | None = None
        for turned in (False, True):
            try:
                weight = self._stacked(found, wanted, shape, turned)
            except FormatMismatch as mismatch:
                problem = problem or mismatch
                continue
            self.used.update(found)
            return self._perhaps_interleaved(name, weight, found)
        raise problem or AssertionError

    def _perhaps_interleaved(self, name: str, weight: Weight, holders: list[str]) -> Weight:
        """Gate and up that the quantized checkpoint stores apart: where they are fused, their rows may alternate."""
        if not in_halves(name) or not set(holders[::2]).isdisjoint(holders[1::2]):
            return weight
        run = weight.shape[-1 if is_bias(name) else -2]
        if run % 2:
            return weight
        alternate = interleaved_halves(weight, run)
        alternate = replace(alternate, evidence=("rows of gate and up in turn", *alternate.evidence))
        below = replace(weight, evidence=("rows of gate, then those of up", *weight.evidence))
        config = self.quantized.checkpoint.config.get("config.json")
        known = isinstance(config, dict) and config.get("model_type") in INTERLEAVED_GATE_UP
        first, second = (alternate, below) if known else (below, alternate)
        return first.or_else((*first.alternatives, replace(second, alternatives=())))

    def _holders(self, atoms: Sequence[str]) -> list[str]:
        """What holds each of the atoms; empty where nothing holds any."""
        found = {atom: self._holder(atom) for atom in atoms}
        missing = [atom for atom, holder in found.items() if holder is None]
        if 0 < len(missing) < len(found):
            raise FormatMismatch(f"only a part of it is stored: nothing holds {display(missing[0])}")
        return [holder for atom in atoms if (holder := found[atom])]

    def _check_claims(self, atoms: Sequence[str], holders: Sequence[str]) -> None:
        """One weight cannot stand for two of the original."""
        for atom, holder in zip(atoms, holders, strict=True):
            claims = self.claims.get(atom, [])
            if len(claims) > 1:
                raise FormatMismatch(
                    f"{display(holder)} may be {display(claims[0])} or {display(claims[1])} of the original"
                )

    def _holder(self, atom: str) -> str | None:
        holders = self.holders.get(atom, [])
        if len(holders) > 1:
            raise FormatMismatch(f"two weights could hold it: {display(holders[0])} and {display(holders[1])}")
        return holders[0] if holders else None

    def _stacked(self, holders: list[str], wanted: tuple[str, ...], shape: Shape, turned: bool) -> Weight:
        """The atoms' weights on top of each other."""
        shape = swapped(shape) if turned else shape
        pieces = []
        for holder, run in groupby(zip(holders, wanted, strict=True), key=lambda pair: pair[0]):
            pieces.append(self._piece(holder, [atom for _, atom in run], wanted, shape, turned))
        if is_bias(wanted[0]) and len(shape) == 2 and len(wanted) > shape[0]:
            pieces = _in_rows(pieces, shape)
        long = len(shape) > 1 and any(piece.shape[-1] != shape[-1] for piece in pieces)
        if long or sum(prod(piece.shape) for piece in pieces) != prod(shape):
            shapes = " + ".join(str(list(piece.shape)) for piece in pieces[:4])
            raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} in {display(holders[0])}")
        return stacked(pieces, shape)

    def _piece(self, holder: str, atoms: list[str], wanted: tuple[str, ...], shape: Shape, turned: bool) -> Weight:
        """Neighbouring atoms of one quantized weight."""
        held = self.atoms[holder]
        whole = self._recognized(holder, held, wanted, shape, turned)
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
        told = f"rows of {len(rows)} layers times {entry.name.rpartition('.')[2]}"
        factored = scaled(whole, stored.repeat_interleave(torch.tensor(rows)), 0)
        return replace(factored, refusal=None, evidence=(*factored.evidence, told))

    def _rows(self, held: Atoms, whole: Weight) -> list[int]:
        """Rows of each atom of a weight."""
        total = whole.shape[0] if len(whole.shape) == 1 else whole.matrix[0]
        known = [self.sizes.get(atom) for atom in held.names]
        if all(known):
            rows = [size[0] for size in known if size]
            if sum(rows) == total:
                return rows
        if held.even and total % len(held.names) == 0:
            return [total // len(held.names)] * len(held.names)
        raise FormatMismatch(
            f"the rows of {display(whole.name)} that hold it cannot be told from the shapes of the original"
        )

    def _recognized(self, holder: str, held: Atoms, wanted: tuple[str, ...], shape: Shape, turned: bool) -> Weight:
        return self.quantized.recognized(holder, self._expected(holder, held, wanted, shape, turned))

    def _expected(self, holder: str, held: Atoms, wanted: tuple[str, ...], shape: Shape, turned: bool) -> Shape | None:
        """The shape that a quantized weight should have, as far as the original tells."""
        if held.names == wanted and len(self.quantized.codes[holder].shape) < 3:
            return shape
        sizes = [self.sizes.get(atom) for atom in held.names]
        if not all(sizes):
            return shape if held.names == wanted else None
        known = [swapped(size) if turned else size for size in sizes if size]
        rows = sum(size[0] for size in known)
        if len(self.quantized.codes[holder].shape) > 2:
            stack = self.quantized.codes[holder].shape[0]
            return stack, rows // stack, *known[0][1:]
        return rows, *known[0][1:]

    def _by_head(self, heads: tuple[str, ...], shape: Shape) -> Weight | None:
        """The rows of each head, the first of which MLX stores as a stack of its own, [heads, cols, rows]."""
        holders = self._holders(heads)
        if not holders:
            return None
        first, rest = (self.quantized.recognized(holder) for holder in holders)
        told = f"shape {list(shape)} in the original, {list(first.shape)} and {list(rest.shape)} in the quantized"
        if {len(first.shape), len(rest.shape)} != {3} or first.shape[0] != rest.shape[0]:
            raise FormatMismatch(told)
        if any(weight.matrix[1] != weight.shape[2] for weight in (first, rest)):  # taken for a convolution
            raise FormatMismatch(f"{told}: heads of so few columns are not read")
        first = flipped(first)
        n, rows, cols = first.shape
        more = rest.shape[1]
        if (n * (rows + more), cols) != shape or rest.shape[2] != cols:
            raise FormatMismatch(told)
        self.used.update(holders)
        pieces = [rows_of(w, head * r, (r, cols)) for head in range(n) for w, r in ((first, rows), (rest, more))]
        return stacked(pieces, shape)

    def _side_by_side(self, columns: tuple[str, ...], shape: Shape) -> Weight | None:
        holders = self._holders(columns)
        if not holders:
            return None
        if len(shape) == 1:  # each has a bias, and the layer adds them
            biases = [self.quantized.recognized(holder, shape) for holder in holders]
            if any(bias.shape != shape for bias in biases):
                told = " + ".join(str(list(bias.shape)) for bias in biases)
                raise FormatMismatch(f"shape {list(shape)} in the original, {told} in the quantized")
            self.used.update(holders)
            return added(biases)
        weights = [self.quantized.recognized(holder) for holder in holders]
        if sum(weight.shape[-1] for weight in weights) != shape[-1]:
            told = " + ".join(str(list(weight.shape)) for weight in weights)
            raise FormatMismatch(f"shape {list(shape)} in the original, {told} side by side in the quantized")
        self.used.update(holders)
        return side_by_side(weights, shape)


def _in_rows(biases: list[Weight], shape: Shape) -> list[Weight]:
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
        if not atoms.even or not shape:
            continue
        rows = prod(shape[:-1]) if len(shape) == 3 and len(atoms.names) > 1 else shape[0]
        for atom in atoms.names:
            if atom in sizes:
                twice.add(atom)
            if len(shape) == 2 and is_bias(atom) and len(atoms.names) > 1:
                sizes[atom] = (prod(shape) // len(atoms.names),)
            else:
                sizes[atom] = (rows // len(atoms.names), *shape[1:][-1:]) if len(atoms.names) > 1 else shape
    return {atom: shape for atom, shape in sizes.items() if atom not in twice}
