"""Transforms of compressed-tensors: matrices that multiply the inputs of layers while a model runs, undone in weights.

    transform_config.config_groups.NAME    type, head_dim, randomize; apply: targets, ignore, location, inverse
    X.NAME_input.weight, .perm             the matrix T of layer X; layers with equal matrices share the first layer's

    input           inputs are multiplied by V before they are rounded: x V
    weight_input    the stored weight is W V^-T; so stored · V^T is the weight in the original's basis

A target can be a class, but no file states the class of a module: "Linear" is taken to mean all matrices except
embeddings. Unquantized routers and experts may be of other classes; the original's values then decide
(alternatives.py), with a warning.

Only ``input`` is undone. With ``output``, ``q_attn`` and ``k_cache`` a model computes in a way that no weight shows.
A wrong declaration is visible: a weight that was not rotated comes out rotated, far from the original.

Reference: vllm-project/compressed-tensors 0.20.0 transform/transform_args.py, transform/factory/base.py,
transform/utils/matrix.py, utils/match.py.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from quanterr.checkpoints import Entry
from quanterr.errors import FormatMismatch
from quanterr.formats import Values, Weight
from quanterr.formats.base import WEIGHT_SUFFIX, InputRotation, RotatedWeight
from quanterr.formats.shared.config_checks import matches, read_integers
from quanterr.formats.shared.transform_matrix import TransformMatrix
from quanterr.lazy_torch import Tensor
from quanterr.selection.roles import role_of
from quanterr.tensors.chunks import Chunk
from quanterr.tensors.workspace import Workspace
from quanterr.util.strict_json import JsonFields, as_object
from quanterr.util.text import display, listed

INPUT = "input"
FUSED = ("weight_input", "weight_output")  # locations whose matrix is already part of the stored weight
HADAMARD, RANDOM_HADAMARD, RANDOM_MATRIX = "hadamard", "random-hadamard", "random-matrix"
KINDS = (HADAMARD, RANDOM_HADAMARD, RANDOM_MATRIX)
STORED = "the weight of a module that is not a Linear, whose inputs have no transform"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
LINEAR = "Linear"
LOOKED_UP = ("embedding", "norm")  # roles of matrices that belong to no Linear
ROUTERS = ("gate", "router")  # last parts of names of modules that are Linear in some models only
AGAIN = "export the model again with both sides of the transform, and with its matrix"


class Transform(NamedTuple):
    """A transform at one location, as config.json declares it."""

    group: str
    kind: str
    location: str
    targets: tuple[str, ...]
    ignored: tuple[str, ...]
    inverse: bool
    block: object  # head_dim: number of columns that are multiplied together; None: all
    randomized: bool

    def is_of(self, weight: str, shape: tuple[int, ...]) -> bool:
        """Return whether the module of a weight has this transform: by its name, or because it seems to be a Linear."""
        module, is_linear = weight.removesuffix(WEIGHT_SUFFIX), _may_be_linear(weight, shape)
        return weight.endswith(WEIGHT_SUFFIX) and self.is_at(module, is_linear)

    def is_at(self, module: str, is_linear: bool = True) -> bool:
        """Return whether a module of this name has this transform; ``is_linear`` states whether it is a Linear."""
        return _is_named(self.targets, module, is_linear) and not _is_named(self.ignored, module, is_linear)


def read_transforms(config: JsonFields) -> list[Transform]:
    """Return the transforms that a quantization_config declares, in its order."""
    if "transform_config" not in config:
        return []
    groups = as_object(as_object(config["transform_config"]).get("config_groups"))
    found = []
    for group, scheme in ((group, as_object(fields)) for group, fields in groups.items()):
        places = scheme.get("apply")
        found += [
            Transform(
                group,
                str(scheme.get("type")),
                str(place.get("location")),
                _texts(place.get("targets")),
                _texts(place.get("ignore")),
                place.get("inverse") is True,
                scheme.get("head_dim"),
                scheme.get("randomize") is True,
            )
            for place in map(as_object, places if isinstance(places, list) else [])
        ]
    return found


def _texts(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    return tuple(text for text in given if isinstance(text, str))


def _is_named(patterns: tuple[str, ...], module: str, is_linear: bool) -> bool:
    return any(
        matches(pattern[3:], module, from_start=True)
        if pattern.startswith("re:")
        else pattern == module or (is_linear and pattern == LINEAR)
        for pattern in patterns
    )


def find_fused_transforms(config: JsonFields, weights: Sequence[Weight]) -> list[Transform]:
    """Return the transforms in stored weights that no transform of inputs undoes, one of each group."""
    declared = read_transforms(config)
    found = dict[str, Transform]()
    for each in declared:
        undoing = [other for other in declared if other.group == each.group and other.location == INPUT]
        if each.location in FUSED and not (each.location == "weight_input" and _is_undone(each, undoing, weights)):
            found.setdefault(each.group, each)
    return list(found.values())


def _is_undone(fused: Transform, by: Sequence[Transform], weights: Sequence[Weight]) -> bool:
    """Return whether the inputs of all weights with the transform ``fused`` have one of the transforms ``by``."""
    own = [weight for weight in weights if fused.is_of(weight.name, weight.shape)]
    if not own:
        return any((one.targets, one.ignored) == (fused.targets, fused.ignored) for one in by)
    return all(any(one.is_of(weight.name, weight.shape) for one in by) for weight in own)


def find_online_transforms(config: JsonFields, weights: Sequence[Weight]) -> list[str]:
    """Return the group and location of each transform that a runtime applies and that none of these weights undoes."""
    found = [
        f"{display(each.group)} ({display(each.location)})"
        for each in read_transforms(config)
        if each.location not in FUSED
        and not (each.location == INPUT and any(each.is_of(one.name, one.shape) for one in weights if one.rotated))
    ]
    return list(dict.fromkeys(found))


def find_lone_transforms(config: JsonFields, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the groups of transforms that nothing undoes while a model runs, with the reason.

    A rotation of a weight's columns is undone by a rotation of its inputs, or of the rows of the weight before it.
    Random matrices for inputs, queries and keys have to be stored; runtimes know the Hadamard matrix.
    """
    found = dict[str, str]()
    groups: dict[str, list[Transform]] = {}
    for each in read_transforms(config):
        groups.setdefault(each.group, []).append(each)
    for group, own in groups.items():
        places = {each.location for each in own}
        online = places.difference(FUSED)
        endings = tuple(f".{group}_{place}.weight" for place in online)
        if len(places) == 1 and not online:
            found[group] = f"it is applied as {min(places)} only, and nothing undoes it"
        elif online and own[0].kind.startswith("random") and not any(name.endswith(endings) for name in entries):
            found[group] = f"its matrix, {min(endings)[1:]}, is not stored"
    return found


class Transforms:
    """The transforms of one checkpoint, and its stored matrices."""

    def __init__(self, config: JsonFields, entries: Mapping[str, Entry]) -> None:
        """Find the stored matrices by their names."""
        self._all, self._entries = read_transforms(config), entries
        self._matrices: dict[str, list[tuple[str, Transform]]] = {}  # by group: matrices with their transforms
        self.consumed: set[str] = set()  # names of tensors that belong to transforms of inputs
        self._others = dict[str, Transform]()  # name of a tensor → the other transform that it belongs to
        for name in entries if self._all else ():
            module, _, last = name.rpartition(".")
            owner, _, place = module.rpartition(".")
            own = [each for each in self._all if place == f"{each.group}_{each.location}"]
            if not own or last not in ("weight", "perm"):
                continue
            one = next((each for each in own if each.is_at(owner)), own[0])
            if one.location == INPUT:
                self.consumed.add(name)
            else:
                self._others[name] = one
            if last == "weight":
                self._matrices.setdefault(one.group, []).append((name, one))

    def explain(self, name: str) -> str | None:
        """Return why the transform of a stored matrix is not undone; None for any other tensor."""
        one = self._others.get(name)
        if one is None:
            return None
        return (
            f"the matrix of the transform {display(one.group)}, which a runtime applies at {display(one.location)}: "
            "only transforms of inputs are undone; measure the checkpoint in its runtime, or export it without"
        )

    def applies_to(self, weight: str, shape: tuple[int, ...]) -> bool:
        """Return whether a transform of inputs is declared for a weight."""
        return any(each.location == INPUT and each.is_of(weight, shape) for each in self._all)

    def undo(self, weight: Weight) -> Weight:
        """Return a weight with the transform of its inputs undone, as if it took inputs that are not transformed.

        Raises:
            FormatMismatch: a declared transform cannot be undone; the message says what was found and expected.
        """
        if not self._all:
            return weight
        own = [each for each in self._all if each.location == INPUT and each.is_of(weight.name, weight.shape)]
        if not own:
            return weight
        named = listed([each.group for each in own], 3)
        if len(own) > 1:
            raise FormatMismatch(
                f"config.json declares several transforms of its inputs, {named}, and not in which order: {AGAIN}"
            )
        if not _may_be_linear(weight.name, weight.shape) or weight.rotated or weight.branch:
            raise FormatMismatch(
                f"config.json declares the transform {named} of its inputs, and {list(weight.shape)} in "
                f"{weight.format} is not a plain matrix of a linear layer: {AGAIN}"
            )
        module = weight.name.removesuffix(WEIGHT_SUFFIX)
        matrix = self._find_matrix(own[0], module, weight.matrix[1])
        named = f"{own[0].group} ({own[0].kind}, {matrix.n} columns)"
        undone = view_without_rotation(weight, f"its inputs are transformed by {named}, which is undone", matrix)
        may_be_other = role_of(module + WEIGHT_SUFFIX) == "experts" or module.rpartition(".")[2] in ROUTERS
        if weight.has_codes or own[0].is_at(module, False) or not may_be_other:
            return undone  # the module can only be a Linear
        return undone.with_alternatives([replace(weight, evidence=(STORED, *weight.evidence))])

    def _find_matrix(self, transform: Transform, module: str, cols: int) -> TransformMatrix:
        called = f"the transform {display(transform.group)} of its inputs"
        if transform.kind not in KINDS:
            raise FormatMismatch(
                f"config.json declares {called} as {display(transform.kind)}; known are {listed(list(KINDS))}: {AGAIN}"
            )
        n = cols if transform.block is None else transform.block
        if not isinstance(n, int) or isinstance(n, bool) or n < 1 or cols % n:
            raise FormatMismatch(
                f"config.json declares {called} with head_dim {display(str(n))}, which does not divide its {cols} "
                f"columns: {AGAIN}"
            )
        is_hadamard = transform.kind != RANDOM_MATRIX
        randomized = transform.randomized and is_hadamard
        is_transposed = is_hadamard and transform.inverse
        name = self._find_stored(transform, module, n)
        if name is None:
            if transform.kind != HADAMARD or randomized or n & (n - 1):
                looked_for = f"{module}.{transform.group}_{INPUT}.weight"
                raise FormatMismatch(
                    f"config.json declares {called}, and its matrix {display(looked_for)}, [{n}, {n}], is not stored: "
                    f"{AGAIN}"
                )
            return TransformMatrix(n, None)
        entry = self._entries[name]
        if entry.shape != (n, n) or entry.dtype not in FLOATS:
            raise FormatMismatch(f"the matrix of {called}, {entry}, should be floats of [{n}, {n}]: {AGAIN}")
        return TransformMatrix(
            n, entry, self._find_permutation(name, n) if randomized else None, is_hadamard, is_transposed
        )

    def _find_stored(self, transform: Transform, module: str, n: int) -> str | None:
        """Return the name of the matrix of a module: its own, or the only one of that size that it can share."""
        own = f"{module}.{transform.group}_{INPUT}.weight"
        if own in self._entries:
            return own
        found = [
            name
            for name, other in self._matrices.get(transform.group, ())
            if self._entries[name].shape == (n, n)
            and (transform.kind != RANDOM_MATRIX or other.inverse == transform.inverse)
        ]
        if len(found) > 1:
            raise FormatMismatch(
                f"its inputs have the transform {display(transform.group)}; it stores no matrix, and could share any "
                f"of {listed(found, 3)}: {AGAIN}"
            )
        return found[0] if found else None

    def _find_permutation(self, matrix: str, n: int) -> Entry:
        name = matrix.removesuffix("weight") + "perm"
        entry = self._entries.get(name)
        if entry is None or entry.dtype != "I64" or entry.shape != (n,):
            raise FormatMismatch(
                f"its inputs have a transform with randomize, and the permutation {display(name)}, I64 [{n}], "
                + (f"is not stored: {AGAIN}" if entry is None else f"is stored as {entry}: {AGAIN}")
            )
        if sorted(read_integers(entry)) != list(range(n)):
            raise FormatMismatch(f"{entry} should hold each number from 0 to {n - 1} once: {AGAIN}")
        return entry


def _may_be_linear(weight: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and role_of(weight) not in LOOKED_UP


class Rotation(Protocol):
    """A matrix that multiplies each run of ``n`` columns of rows, (r, c), in place."""

    @property
    def n(self) -> int:
        """The columns that are multiplied together."""

    def apply(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply inputs, as the model does."""

    def undo(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Undo this in inputs."""

    def apply_to_weight(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply a weight that takes such inputs, as its quantizer did."""

    def undo_in_weight(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Undo this in the weight."""


def view_without_rotation(weight: Weight, what: str, matrix: Rotation) -> Weight:
    """Return a weight as it was before its columns were multiplied; ``what`` is the evidence, in words."""
    return replace(
        weight,
        dequantize=partial(_dequantize, weight, matrix),
        uniform_bits=None,
        levels=None,
        unit=None,
        rotated=RotatedWeight(weight, matrix.apply_to_weight, InputRotation(matrix.apply, matrix.undo)),
        evidence=(what, *weight.evidence),
        alternatives=tuple(view_without_rotation(one, what, matrix) for one in weight.alternatives),
        computed=True,
    )


def _dequantize(weight: Weight, matrix: Rotation, chunk: Chunk, workspace: Workspace) -> Values:
    """Dequantize whole runs of columns and multiply them by the matrix."""
    n = matrix.n
    whole = chunk._replace(col=chunk.col // n * n, stop_col=-(-chunk.stop_col // n) * n)
    found = weight.dequantize(whole, workspace)
    values = matrix.undo_in_weight(found.weight, workspace)
    if whole == chunk:
        return Values(values, found.saturated)
    cropped = workspace.buffer("transformed_part", chunk.shape, values.dtype)
    return Values(cropped.copy_(values[:, chunk.col - whole.col : chunk.stop_col - whole.col]), found.saturated)
