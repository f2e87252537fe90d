"""Search for weights of the original that the quantized checkpoint stores under other names, fused, split or stacked.

A match must be unique: if two weights could hold the same projection, neither is used.

Rows of gate and up alternate in the fused weights of some models, which the conversion knows (conversion.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from quanterr.errors import FormatMismatch
from quanterr.formats import Weight
from quanterr.formats.base import FUSED
from quanterr.lazy_torch import torch
from quanterr.pairing.conversion import Conversion, Shape
from quanterr.pairing.converters.orders import grid
from quanterr.pairing.names import Atoms, has_equal_parts
from quanterr.pairing.side import CheckpointSide
from quanterr.pairing.views import (
    add_weights,
    join_columns,
    reorder,
    reshape_weight,
    scale_weight,
    stack_weights,
    take_rows,
    transpose_weight,
)
from quanterr.tensors.workspace import find_dtype
from quanterr.util.text import display, itemize


class HeldWeight(NamedTuple):
    """A weight of the original as the quantized checkpoint stores it, and the names of the weights that hold it."""

    weight: Weight
    holders: tuple[str, ...]


class Holders:
    """An index of the unmatched quantized weights by the atoms that they hold."""

    def __init__(
        self,
        quantized: CheckpointSide,
        conversion: Conversion,
        originals: Mapping[str, Shape],
        alone: Iterable[str],
        free: Iterable[str],
    ) -> None:
        """Index the quantized weights ``free`` and the originals ``alone``: those without a partner of the same name.

        ``originals`` maps every weight of the original to its shape.
        """
        self._quantized, self._conversion, naming = quantized, conversion, conversion.atoms
        self._sizes = _find_shapes(originals, conversion)  # atom → its shape in the original, where that is unique
        self._atoms: dict[str, Atoms] = {}  # quantized weight → its atoms
        self._holders: dict[str, list[str]] = {}  # atom → quantized weights
        self._claims: dict[str, list[str]] = {}  # atom → weights of the original that need it
        self.used: set[str] = set()  # quantized weights that find() has returned
        for name in alone:
            for atom in naming(0, name, originals[name]).names:
                self._claims.setdefault(atom, []).append(name)
        for name in free:
            shape = quantized.codes[name].shape
            self._atoms[name] = atoms = naming(1, name, (*shape[:1], 1, 1) if len(shape) > 2 else shape)
            for atom in atoms.names:
                self._holders.setdefault(atom, []).append(name)

    def find(self, name: str, shape: Shape) -> HeldWeight | None:
        """Assemble the original's weight of this name and shape; None if the quantized checkpoint holds no part of it.

        The result may have its last two axes swapped.

        Raises:
            FormatMismatch: the weight is not unique on either side, only partly stored, or cannot be read in this
                shape.
        """
        arrange = {"rows": self._assemble_rows, "columns": self._assemble_columns, "heads": self._assemble_heads}
        for wanted in (*self._conversion.find_other_arrangements(name), self._conversion.atoms(0, name, shape)):
            if holders := self._find_holders(wanted.names):
                weight = arrange[wanted.axis](name, wanted, holders, shape)
                self.used.update(holders)
                return HeldWeight(weight, tuple(dict.fromkeys(holders)))
        return None

    def _find_holders(self, atoms: Sequence[str]) -> list[str]:
        """Return the holder of each atom; an empty list if no atom has one.

        Raises:
            FormatMismatch: only some atoms have a holder, or a holder is not unique.
        """
        candidates = [self._holders.get(atom, []) for atom in atoms]
        for atom, holders in zip(atoms, candidates, strict=True):
            if len(holders) > 1:
                raise FormatMismatch(f"two weights could hold it: {display(holders[0])} and {display(holders[1])}")
            if not holders and any(candidates):
                raise FormatMismatch(f"only a part of it is stored: no tensor holds {display(atom)}")
            claims = self._claims.get(atom, [])
            if holders and len(claims) > 1:
                raise FormatMismatch(
                    f"{display(holders[0])} may be {display(claims[0])} or {display(claims[1])} of the original"
                )
        return [holders[0] for holders in candidates if holders]

    def _assemble_rows(self, name: str, wanted: Atoms, holders: list[str], shape: Shape) -> Weight:
        """Stack the atoms' weights by rows, in this shape or with its last two axes swapped."""
        problem: FormatMismatch | None = None
        for transpose in (False, True):
            try:
                weight = self._stack_pieces(wanted, holders, swap_last_axes(shape) if transpose else shape, transpose)
            except FormatMismatch as mismatch:
                problem = problem or mismatch
                continue
            if wanted.order is not None:
                evidence = ("rows put back in the order of key heads", *weight.evidence)
                weight = replace(reorder(weight, wanted.order), evidence=evidence)
            apart = has_equal_parts(name) and set(holders[::2]).isdisjoint(holders[1::2])
            return self._offer_alternating_rows(weight, wanted.are_biases) if apart else weight
        if len(wanted.names) == 1 and len(shape) > 2 and self._atoms[holders[0]].names == wanted.names:
            return self._quantized.recognize(holders[0])  # perhaps a kernel in another order of axes
        raise problem or AssertionError

    def _offer_alternating_rows(self, weight: Weight, are_biases: bool) -> Weight:
        """Return gate and up in the order of rows that the model prescribes; the other order is an alternative."""
        run, alternates = weight.shape[-1 if are_biases else -2], self._conversion.alternates
        if run % 2:
            return weight
        alternate = reorder(weight, grid(run // 2, 2, columns=are_biases and len(weight.shape) > 1))
        alternate = replace(alternate, evidence=("rows of gate and up alternating", *alternate.evidence))
        below = replace(weight, evidence=("rows of gate, then those of up", *weight.evidence))
        first, second = (alternate, below) if alternates else (below, alternate)
        first = first.with_alternatives((*first.alternatives, replace(second, alternatives=())))
        return replace(first, prescribed=alternates is not None)

    def _stack_pieces(self, wanted: Atoms, holders: list[str], shape: Shape, transpose: bool) -> Weight:
        pieces = []
        for holder, run in self._find_runs(holders, wanted.names):
            pieces.append(self._take_piece(holder, run, wanted, shape, transpose))
        if wanted.are_biases and len(shape) == 2 and len(wanted.names) > shape[0]:
            pieces = _join_bias_rows(pieces, shape)
        long = len(shape) > 1 and any(piece.shape[-1] != shape[-1] for piece in pieces)
        if long or sum(prod(piece.shape) for piece in pieces) != prod(shape):
            shapes = " + ".join(str(list(piece.shape)) for piece in pieces[:4])
            raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} in {display(holders[0])}")
        return stack_weights(pieces, shape)

    def _find_runs(self, holders: Sequence[str], atoms: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Group atoms that are next to each other, and in the same order, in one quantized weight."""
        runs: list[tuple[str, list[str]]] = []
        for holder, atom in zip(holders, atoms, strict=True):
            held = self._atoms[holder].names
            if runs and runs[-1][0] == holder and held[held.index(runs[-1][1][-1]) + 1 :][:1] == (atom,):
                runs[-1][1].append(atom)
            else:
                runs.append((holder, [atom]))
        return runs

    def _take_piece(self, holder: str, atoms: list[str], wanted: Atoms, shape: Shape, transpose: bool) -> Weight:
        """Return the rows of adjacent atoms of one quantized weight."""
        held = self._atoms[holder]
        whole = self._quantized.recognize(holder, self._infer_shape(holder, held, wanted, shape, transpose))
        if FUSED in whole.parts:
            whole = self._apply_factors(held, whole)
        if self._conversion.is_flat(atoms[0]) and whole.n == prod(shape):
            return reshape_weight(whole, shape)
        if list(held.names) == atoms:
            return whole
        if self._conversion.alternates and has_equal_parts(holder):
            run = whole.shape[-1 if held.are_biases else -2]
            whole = reorder(whole, grid(2, run // 2, columns=held.are_biases and len(whole.shape) > 1))
        first = held.names.index(atoms[0])
        rows = self._count_rows(held, whole)
        begin, end = sum(rows[:first]), sum(rows[: first + len(atoms)])
        return take_rows(whole, begin, (end - begin, *whole.shape[-1:]) if len(whole.shape) > 1 else (end - begin,))

    def _apply_factors(self, held: Atoms, whole: Weight) -> Weight:
        """Multiply the rows of each layer in a fused weight by the layer's own factor."""
        entry, rows = whole.parts[FUSED], self._count_rows(held, whole)
        if entry.n != len(rows):
            raise FormatMismatch(
                f"{entry} should have a number for each of {len(rows)} layers: {itemize(list(held.names))}"
            )
        stored = torch.frombuffer(bytearray(entry.read()), dtype=find_dtype(entry.dtype)).float()
        description = f"rows of {len(rows)} layers times {entry.name.rpartition('.')[2]}"
        factored = scale_weight(whole, stored.repeat_interleave(torch.tensor(rows)), 0)
        return replace(factored, refusal=None, evidence=(*factored.evidence, description))

    def _count_rows(self, held: Atoms, whole: Weight) -> list[int]:
        """Return the number of rows of each atom of a weight."""
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

    def _infer_shape(self, holder: str, held: Atoms, wanted: Atoms, shape: Shape, transpose: bool) -> Shape | None:
        """Return the shape that a quantized weight should have; None if the original does not determine it."""
        stored = self._quantized.codes[holder].shape
        if self._conversion.is_flat(wanted.names[0]):
            return (*shape[:2], 1, 1)[: len(stored)]
        if held.names == wanted.names and (len(stored) < 3 or len(stored) == len(shape)):
            return shape
        sizes = [self._sizes.get(atom) for atom in held.names]
        if not all(sizes):
            return shape if held.names == wanted.names else None
        known = [swap_last_axes(size) if transpose else size for size in sizes if size]
        rows = sum(size[0] for size in known)
        if len(stored) > 2:
            return stored[0], rows // stored[0], *known[0][1:]
        return rows, *known[0][1:]

    def _assemble_heads(self, _name: str, _wanted: Atoms, holders: list[str], shape: Shape) -> Weight:
        """Join the rows of each head from MLX's two stacks: the first rows, [heads, cols, rows], and the others."""
        first, rest = (self._quantized.recognize(holder) for holder in holders)
        shapes = f"shape {list(shape)} in the original, {list(first.shape)} and {list(rest.shape)} in the quantized"
        if {len(first.shape), len(rest.shape)} != {3} or first.shape[0] != rest.shape[0]:
            raise FormatMismatch(shapes)
        if any(
            weight.matrix[1] != weight.shape[2] for weight in (first, rest)
        ):  # a stack that was taken for a convolution
            raise FormatMismatch(f"{shapes}: heads with so few columns are not supported")
        first = transpose_weight(first)
        n, rows, cols = first.shape
        more = rest.shape[1]
        if (n * (rows + more), cols) != shape or rest.shape[2] != cols:
            raise FormatMismatch(shapes)
        pieces = [take_rows(w, head * r, (r, cols)) for head in range(n) for w, r in ((first, rows), (rest, more))]
        return stack_weights(pieces, shape)

    def _assemble_columns(self, _name: str, wanted: Atoms, holders: list[str], shape: Shape) -> Weight:
        """Join matrices side by side; biases are added, as the layer adds the bias of each part."""
        if wanted.are_biases:
            biases = [self._quantized.recognize(holder, shape) for holder in holders]
            if any(bias.shape != shape for bias in biases):
                shapes = " + ".join(str(list(bias.shape)) for bias in biases)
                raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} in the quantized")
            return add_weights(biases)
        weights = [self._quantized.recognize(holder) for holder in holders]
        if wanted.order is not None and prod(shape) == sum(weight.n for weight in weights):
            return reorder(join_columns(weights, shape), wanted.order)
        if sum(weight.shape[-1] for weight in weights) != shape[-1]:
            shapes = " + ".join(str(list(weight.shape)) for weight in weights)
            raise FormatMismatch(f"shape {list(shape)} in the original, {shapes} next to each other in the quantized")
        return join_columns(weights, shape)


def _join_bias_rows(biases: list[Weight], shape: Shape) -> list[Weight]:
    """Join the biases of each expert into one row of the fused bias: [gate, up] for each expert."""
    many = len(biases) // shape[0]
    rows = [biases[n : n + many] for n in range(0, len(biases), many)]
    return [
        join_columns([reshape_weight(bias, (1, bias.n)) for bias in row], (1, sum(bias.n for bias in row)))
        for row in rows
    ]


def swap_last_axes(shape: Shape) -> Shape:
    """Return the shape with its last two axes swapped."""
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape


def _find_shapes(originals: Mapping[str, Shape], conversion: Conversion) -> dict[str, Shape]:
    """Return the shape of each atom that exactly one original holds."""
    sizes: dict[str, Shape] = {}
    twice = set()
    for name, shape in originals.items():
        atoms = conversion.atoms(0, name, shape)
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
