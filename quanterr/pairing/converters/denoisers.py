"""Pairing of denoisers and VAEs in diffusers' names with those in the names of their authors, which ComfyUI keeps.

denoisers.json in this folder holds a row for each tensor of the authors: the parameters of diffusers that its rows
make up, from top to bottom. tests/make_denoiser_names.py makes it by running diffusers' own converters on labels.
authors.py has such rows of other models.

    "double_blocks.*.img_attn.qkv": ["transformer_blocks.*.attn.to_q", "….to_k", "….to_v"]
    "final_layer.adaLN_modulation.1": ["norm_out.linear:1", "norm_out.linear:0"]

    *        the number of a block, the same in all names of a row; $ in its place: only the last block
    :0, :1   equal parts of a parameter: here, diffusers stores the scale above the shift, the authors below it
    []       a tensor that diffusers' model does not have
    unequal  names whose parts differ in their number of rows
    flat     convolutions with a kernel of 1 × 1, [out, in, 1, 1], which diffusers' model has as a matrix, [out, in]

The rows hold for .weight and .bias alike, and leave out tensors that have the same name in both.

Reference: huggingface/diffusers@0.42.1 src/diffusers/loaders/single_file_utils.py.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from quanterr.checkpoints.labels import PREFIXES
from quanterr.pairing.converters.authors import AUTHORS
from quanterr.pairing.names import Atoms, atoms_of
from quanterr.selection.roles import MAX_DIGITS, unify_numbers

KINDS = (".weight", ".bias")
NUMBER, LAST = "*", "$"


class Family(NamedTuple):
    """A family of models: its table, and the names in it that are unequal or flat (see above)."""

    name: str
    tensors: Mapping[str, tuple[str, ...]]
    unequal: frozenset[str]
    flat: frozenset[str] = frozenset()
    biases: Mapping[str, str] = {}  # name whose bias is another parameter → that parameter (authors.py)


class Held(NamedTuple):
    """The parameters of diffusers, or parts of them, that a tensor of the authors holds."""

    pieces: tuple[str, ...]  # full names, each with the number of its part, if any: norm_out.linear.weight:1
    equal: bool  # whether they have equally many rows
    flat: bool = False  # whether the authors have a convolution, and diffusers a matrix


class DenoiserNaming:
    """The atoms of weights on two sides, one of which has the authors' names; they are named after diffusers."""

    def __init__(self, side: int, held: Mapping[str, Held]) -> None:
        """Keep what the names of the authors' side hold: 0 is the original, 1 the quantized."""
        self._side, self._held = side, held
        pieces = {piece.partition(":") for row in held.values() for piece in row.pieces}
        parts = (_list_atoms(name) for name, _, part in pieces if part)
        self._parts = Counter(chain.from_iterable(parts))  # parameter → number of its parts
        self._flat = frozenset(atom for row in held.values() if row.flat for atom in _list_atoms(row.pieces[0]))

    def atoms(self, side: int, name: str, shape: tuple[int, ...]) -> Atoms:
        """Return the atoms of a weight on a side."""
        if side == self._side and name in self._held:
            held = self._held[name]
            atoms = (_list_atoms(*piece.split(":")) for piece in held.pieces)
            return Atoms(tuple(chain.from_iterable(atoms)), held.equal)
        found = atoms_of(name, shape)
        if side == self._side or self._parts.keys().isdisjoint(found.names):
            return found
        parts = ([_add_part(atom, str(n)) for n in range(self._parts[atom])] or [atom] for atom in found.names)
        return found._replace(names=tuple(chain.from_iterable(parts)))

    def is_flat(self, atom: str) -> bool:
        """Return whether one side has this atom as a convolution of 1 × 1, and the other as a matrix."""
        return atom in self._flat

    def is_dropped(self, name: str) -> bool:
        """Return whether diffusers' model lacks this tensor of the authors."""
        return name in self._held and not self._held[name].pieces


def naming_between(original: Collection[str], quantized: Collection[str]) -> DenoiserNaming | None:
    """Return the naming of two checkpoints whose weights without a partner of the same name are given.

    Returns None unless one of them has the names of a known family's authors, and the other diffusers' names for them.
    """
    sides = original, quantized
    best, most = None, 0
    for side, names in enumerate(sides):
        families = _find_families(names) if sides[1 - side] else []
        others = {atom for name in sides[1 - side] for atom in atoms_of(name, ()).names} if families else set()
        for family in families:
            held = find_held(family, names)
            pieces = (
                {atom for piece in row.pieces for atom in _list_atoms(piece.partition(":")[0])} for row in held.values()
            )
            n = sum(bool(atoms) and others >= atoms for atoms in pieces)
            if n > most:
                best, most = DenoiserNaming(side, held), n
    return best


def _find_families(names: Iterable[str]) -> list[Family]:
    """Return the families whose table may have some of the names, which few names of other models do."""
    known, found = _by_pattern(), dict[str, Family]()
    for pattern in set(map(unify_numbers, names)):
        found |= known.get(_without_kind(_without_prefix(pattern))[0], {})
    return list(found.values())


@cache
def _by_pattern() -> Mapping[str, Mapping[str, Family]]:
    """Map names in which all numbers are the same to the families that have them, by name."""
    found: dict[str, dict[str, Family]] = {}
    for family in families():
        for name in family.tensors:
            pattern = unify_numbers(name.replace(NUMBER, "0").replace(LAST, "0"))
            found.setdefault(pattern, {})[family.name] = family
    return found


@cache
def families() -> tuple[Family, ...]:
    """Return all families of denoisers.json and of authors.py."""
    document = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return tuple(
        Family(
            name,
            {key: tuple(pieces) for key, pieces in row["tensors"].items()},
            frozenset(row["unequal"]),
            frozenset(row.get("flat", ())),
            row.get("biases", {}),
        )
        for name, row in (document["families"] | AUTHORS).items()
    )


def name_family(names: Iterable[str]) -> str | None:
    """Return the family of denoisers that has most names of a checkpoint, in any program's names; None if none has.

    One name may be of several families, so that the family with the most names wins.
    """
    patterns = {_without_kind(_without_prefix(unify_numbers(name)))[0] for name in names}
    most, family = max((len(patterns & known), family) for family, known in _list_namings())
    return family if 2 * most > len(patterns) else None


@cache
def _list_namings() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return each family with the names of its authors, and again with those of diffusers, all numbers the same."""
    found = []
    for family in (family for family in families() if family.name not in AUTHORS):
        theirs = [piece.partition(":")[0] for pieces in family.tensors.values() for piece in pieces]
        for side in (list(family.tensors), theirs):
            patterns = (unify_numbers(name.replace(NUMBER, "0").replace(LAST, "0")) for name in side)
            found.append((family.name, frozenset(_without_kind(pattern)[0] for pattern in patterns)))
    return tuple(found)


def find_held(family: Family, names: Iterable[str]) -> dict[str, Held]:
    """Return what the tensors of a checkpoint hold, by name; only names in the table of the family count."""
    bare = {name: _without_prefix(name) for name in names}
    last = _find_last_blocks(bare.values())
    found = ((name, _look_up(family, short, last)) for name, short in bare.items())
    return {name: held for name, held in found if held is not None}


def _look_up(family: Family, name: str, last: Mapping[str, int]) -> Held | None:
    """Return what the table has for a name without prefix."""
    stem, kind = _without_kind(name)
    for key, number in _list_patterns(stem, last):
        if kind == ".bias" and key in family.biases:
            return Held((family.biases[key].replace(NUMBER, number),), equal=True)
        if key in family.tensors:
            pieces = (piece.replace(NUMBER, number).partition(":") for piece in family.tensors[key])
            return Held(
                tuple(f"{path}{kind}{colon}{part}" for path, colon, part in pieces),
                key not in family.unequal,
                key in family.flat and kind == ".weight",
            )
    return None


def _list_patterns(stem: str, last: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the keys that a name may have in a table, and the number that replaces ``*`` in that row."""
    yield stem, ""
    words = stem.split(".")
    for n, word in enumerate(words):
        if _is_number(word):
            before = ".".join(words[:n])
            for mark in (LAST, NUMBER) if last[before] == int(word) else (NUMBER,):
                yield ".".join([*words[:n], mark, *words[n + 1 :]]), word


def _find_last_blocks(names: Iterable[str]) -> dict[str, int]:
    """Map each path that numbers follow to the largest of them."""
    last: dict[str, int] = {}
    for name in names:
        words = name.split(".")
        for n, word in enumerate(words):
            if _is_number(word):
                before = ".".join(words[:n])
                last[before] = max(last.get(before, 0), int(word))
    return last


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS


def _list_atoms(name: str, part: str = "") -> list[str]:
    """Return the atoms of a parameter of diffusers, or of one of its parts."""
    return [_add_part(atom, part) for atom in atoms_of(name, ()).names]


def _add_part(atom: str, part: str) -> str:
    stem, kind = _without_kind(atom)
    return f"{stem}:{part}{kind}" if part else atom


def _without_prefix(name: str) -> str:
    return name.removeprefix(next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""))


def _without_kind(name: str) -> tuple[str, str]:
    kind = next((kind for kind in KINDS if name.endswith(kind)), "")
    return name.removesuffix(kind), kind
