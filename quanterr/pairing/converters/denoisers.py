"""Pairing of denoisers and VAEs that have diffusers' names with those that have their authors' names, as in ComfyUI.

denoisers.json in this folder maps each tensor of the authors to the parameters of diffusers that its rows hold, from
top to bottom. tests/make_denoiser_names.py makes it by running diffusers' own converters on labelled rows.
authors.py has such rows of other models.

    "double_blocks.*.img_attn.qkv": ["transformer_blocks.*.attn.to_q", "….to_k", "….to_v"]
    "final_layer.adaLN_modulation.1": ["norm_out.linear:1", "norm_out.linear:0"]

    *        *        the number of a block, the same in all names of a row; $ stands for the number of the last block
    :0, :1   equal parts of a parameter; above, diffusers stores the scale before the shift, the authors after it
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

ENDINGS = (".weight", ".bias")
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
    equal: bool  # whether all pieces have the same number of rows
    flat: bool = False  # whether the authors have a convolution, and diffusers a matrix


class DenoiserNaming:
    """The atoms of weights, under diffusers' names, on two sides of which one has the authors' names."""

    def __init__(self, side: int, held: Mapping[str, Held]) -> None:
        """Take the side with the authors' names (0: original, 1: quantized), and what the tensor of each name holds."""
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
        atoms_of_name = atoms_of(name, shape)
        if side == self._side or self._parts.keys().isdisjoint(atoms_of_name.names):
            return atoms_of_name
        parts = ([_add_part(atom, str(n)) for n in range(self._parts[atom])] or [atom] for atom in atoms_of_name.names)
        return atoms_of_name._replace(names=tuple(chain.from_iterable(parts)))

    def is_flat(self, atom: str) -> bool:
        """Return whether one side has this atom as a convolution of 1 × 1, and the other as a matrix."""
        return atom in self._flat

    def is_dropped(self, name: str) -> bool:
        """Return whether diffusers' model lacks this tensor of the authors."""
        return name in self._held and not self._held[name].pieces


def naming_between(original: Collection[str], quantized: Collection[str]) -> DenoiserNaming | None:
    """Return the naming of two checkpoints, from their weights that have no partner of the same name.

    The result is None unless one checkpoint has the authors' names of a known family, and the other diffusers' names.
    """
    sides = original, quantized
    best, max_matches = None, 0
    for side, names in enumerate(sides):
        families = _find_families(names) if sides[1 - side] else []
        others = {atom for name in sides[1 - side] for atom in atoms_of(name, ()).names} if families else set()
        for family in families:
            held = find_held(family, names)
            pieces = (
                {atom for piece in row.pieces for atom in _list_atoms(piece.partition(":")[0])} for row in held.values()
            )
            n = sum(bool(atoms) and others >= atoms for atoms in pieces)
            if n > max_matches:
                best, max_matches = DenoiserNaming(side, held), n
    return best


def _find_families(names: Iterable[str]) -> list[Family]:
    """Return the families whose table may contain some of the names."""
    known, matches = _by_pattern(), dict[str, Family]()
    for pattern in set(map(unify_numbers, names)):
        matches |= known.get(_split_ending(_strip_prefix(pattern))[0], {})
    return list(matches.values())


@cache
def _by_pattern() -> Mapping[str, Mapping[str, Family]]:
    """Map names, with all numbers replaced by 0, to the families that have them, by the family's name."""
    families_by_name: dict[str, dict[str, Family]] = {}
    for family in families():
        for name in family.tensors:
            pattern = unify_numbers(name.replace(NUMBER, "0").replace(LAST, "0"))
            families_by_name.setdefault(pattern, {})[family.name] = family
    return families_by_name


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
    """Return the family of denoisers with the most names of a checkpoint, in any program's names; None if none has any.

    The most names decide because a name can belong to several families.
    """
    patterns = {_split_ending(_strip_prefix(unify_numbers(name)))[0] for name in names}
    max_matches, family = max((len(patterns & known), family) for family, known in _list_namings())
    return family if 2 * max_matches > len(patterns) else None


@cache
def _list_namings() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return each family twice, with its authors' and with diffusers' names, in which all numbers are replaced by 0."""
    namings = []
    for family in (family for family in families() if family.name not in AUTHORS):
        theirs = [piece.partition(":")[0] for pieces in family.tensors.values() for piece in pieces]
        for side in (list(family.tensors), theirs):
            patterns = (unify_numbers(name.replace(NUMBER, "0").replace(LAST, "0")) for name in side)
            namings.append((family.name, frozenset(_split_ending(pattern)[0] for pattern in patterns)))
    return tuple(namings)


def find_held(family: Family, names: Iterable[str]) -> dict[str, Held]:
    """Return what the tensors of a checkpoint hold, by name; only names in the table of the family count."""
    bare = {name: _strip_prefix(name) for name in names}
    last = _find_last_blocks(bare.values())
    rows = ((name, _look_up(family, short, last)) for name, short in bare.items())
    return {name: held for name, held in rows if held is not None}


def _look_up(family: Family, name: str, last: Mapping[str, int]) -> Held | None:
    """Return what the table has for a name without prefix."""
    stem, ending = _split_ending(name)
    for key, number in _list_patterns(stem, last):
        if ending == ".bias" and key in family.biases:
            return Held((family.biases[key].replace(NUMBER, number),), equal=True)
        if key in family.tensors:
            pieces = (piece.replace(NUMBER, number).partition(":") for piece in family.tensors[key])
            return Held(
                tuple(f"{path}{ending}{colon}{part}" for path, colon, part in pieces),
                key not in family.unequal,
                key in family.flat and ending == ".weight",
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
    """Map each path that is followed by a number to the largest such number."""
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
    stem, ending = _split_ending(atom)
    return f"{stem}:{part}{ending}" if part else atom


def _strip_prefix(name: str) -> str:
    return name.removeprefix(next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""))


def _split_ending(name: str) -> tuple[str, str]:
    ending = next((ending for ending in ENDINGS if name.endswith(ending)), "")
    return name.removesuffix(ending), ending
