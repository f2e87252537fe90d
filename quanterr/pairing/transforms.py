"""Transforms of compressed-tensors: matrices that multiply the inputs of layers while a model runs, undone in weights.

    transform_config.config_groups.NAME    type, head_dim, randomize; apply: targets, ignore, location, inverse
    X.NAME_input.weight, .perm             the matrix T of layer X; layers with equal matrices share the first layer's

    input           inputs are multiplied by V before they are rounded: x V
    weight_input    the stored weight is W V^-T; so stored · V^T is the weight in the original's basis

A target can be a class, but no file states the class of a module: "Linear" is taken to mean all matrices except
embeddings. Unquantized routers and experts may have other classes: the interpretation nearer to the original is chosen
(alternatives.py), with a warning.

Only ``input`` is undone. ``output``, ``q_attn`` and ``k_cache`` change what a model computes, but not its weights.
A wrong declaration is visible, because a weight that was not rotated then gets a large error.

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
from quanterr.util.text import display, itemize

INPUT = "input"
FUSED_LOCATIONS = ("weight_input", "weight_output")  # locations whose matrix is already part of the stored weight
HADAMARD, RANDOM_HADAMARD, RANDOM_MATRIX = "hadamard", "random-hadamard", "random-matrix"
MATRIX_TYPES = (HADAMARD, RANDOM_HADAMARD, RANDOM_MATRIX)
UNTRANSFORMED = "the weight of a module that is not a Linear, whose inputs have no transform"
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
LINEAR = "Linear"
NOT_LINEAR = ("embedding", "norm")  # roles of matrices that do not belong to a Linear
ROUTERS = ("gate", "router")  # last words of names of modules that are Linear only in some models
REMEDY = "export the model again with both sides of the transform, and with its matrix"


class Transform(NamedTuple):
    """A transform at one location, as config.json declares it."""

    group: str
    matrix_type: str
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
    transforms = []
    for group, scheme in ((group, as_object(fields)) for group, fields in groups.items()):
        places = scheme.get("apply")
        transforms += [
            Transform(
                group,
                str(scheme.get("type")),
                str(place.get("location")),
                _read_texts(place.get("targets")),
                _read_texts(place.get("ignore")),
                place.get("inverse") is True,
                scheme.get("head_dim"),
                scheme.get("randomize") is True,
            )
            for place in map(as_object, places if isinstance(places, list) else [])
        ]
    return transforms


def _read_texts(value: object) -> tuple[str, ...]:
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
    """Return the transforms of stored weights that no transform of inputs undoes, one of each group."""
    declared = read_transforms(config)
    transforms = dict[str, Transform]()
    for each in declared:
        undoing = [other for other in declared if other.group == each.group and other.location == INPUT]
        if each.location in FUSED_LOCATIONS and not (
            each.location == "weight_input" and _is_undone(each, undoing, weights)
        ):
            transforms.setdefault(each.group, each)
    return list(transforms.values())


def _is_undone(fused: Transform, by: Sequence[Transform], weights: Sequence[Weight]) -> bool:
    """Return whether the inputs of all weights with the transform ``fused`` have one of the transforms ``by``."""
    affected = [weight for weight in weights if fused.is_of(weight.name, weight.shape)]
    if not affected:
        return any((transform.targets, transform.ignored) == (fused.targets, fused.ignored) for transform in by)
    return all(any(transform.is_of(weight.name, weight.shape) for transform in by) for weight in affected)


def find_online_transforms(config: JsonFields, weights: Sequence[Weight]) -> list[str]:
    """Return the group and location of each transform that a runtime applies and that is undone in no weight."""
    descriptions = [
        f"{display(each.group)} ({display(each.location)})"
        for each in read_transforms(config)
        if each.location not in FUSED_LOCATIONS
        and not (
            each.location == INPUT
            and any(each.is_of(weight.name, weight.shape) for weight in weights if weight.rotated)
        )
    ]
    return list(dict.fromkeys(descriptions))


def find_lone_transforms(config: JsonFields, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Map each group of transforms whose inverse is missing in the model to the reason.

    A rotation of a weight's columns is undone by a rotation of its inputs, or of the rows of the weight before it.
    Random matrices for inputs, queries and keys have to be stored; runtimes know the Hadamard matrix.
    """
    reasons = dict[str, str]()
    groups: dict[str, list[Transform]] = {}
    for each in read_transforms(config):
        groups.setdefault(each.group, []).append(each)
    for group, transforms in groups.items():
        places = {each.location for each in transforms}
        online = places.difference(FUSED_LOCATIONS)
        endings = tuple(f".{group}_{place}.weight" for place in online)
        if len(places) == 1 and not online:
            reasons[group] = f"it is applied as {min(places)} only, and nothing undoes it"
        elif (
            online
            and transforms[0].matrix_type.startswith("random")
            and not any(name.endswith(endings) for name in entries)
        ):
            reasons[group] = f"its matrix, {min(endings)[1:]}, is not stored"
    return reasons


class Transforms:
    """The transforms of one checkpoint, and its stored matrices."""

    def __init__(self, config: JsonFields, entries: Mapping[str, Entry]) -> None:
        """Find the stored matrices by their names."""
        self._all, self._entries = read_transforms(config), entries
        self._matrices: dict[str, list[tuple[str, Transform]]] = {}  # by group: matrices with their transforms
        self.consumed: set[str] = set()  # names of tensors of transforms of inputs
        self._others = dict[str, Transform]()  # name of a tensor → the other transform that it belongs to
        for name in entries if self._all else ():
            module, _, last = name.rpartition(".")
            owner, _, place = module.rpartition(".")
            matching = [each for each in self._all if place == f"{each.group}_{each.location}"]
            if not matching or last not in ("weight", "perm"):
                continue
            transform = next((each for each in matching if each.is_at(owner)), matching[0])
            if transform.location == INPUT:
                self.consumed.add(name)
            else:
                self._others[name] = transform
            if last == "weight":
                self._matrices.setdefault(transform.group, []).append((name, transform))

    def explain(self, name: str) -> str | None:
        """Return why the transform of a stored matrix is not undone; None for any other tensor."""
        transform = self._others.get(name)
        if transform is None:
            return None
        return (
            f"the matrix of the transform {display(transform.group)}, which a runtime applies at "
            f"{display(transform.location)}: only transforms of inputs are undone; measure the checkpoint in its "
            "runtime, or export it without"
        )

    def applies_to(self, weight: str, shape: tuple[int, ...]) -> bool:
        """Return whether a transform of inputs is declared for a weight."""
        return any(each.location == INPUT and each.is_of(weight, shape) for each in self._all)

    def undo(self, weight: Weight) -> Weight:
        """Return a weight that takes inputs without a transform, by undoing the declared transform of its inputs.

        Raises:
            FormatMismatch: a declared transform cannot be undone; the message says what was found and expected.
        """
        if not self._all:
            return weight
        transforms = [each for each in self._all if each.location == INPUT and each.is_of(weight.name, weight.shape)]
        if not transforms:
            return weight
        named = itemize([each.group for each in transforms], 3)
        if len(transforms) > 1:
            raise FormatMismatch(
                f"config.json declares several transforms of its inputs, {named}, and not in which order: {REMEDY}"
            )
        if not _may_be_linear(weight.name, weight.shape) or weight.rotated or weight.branch:
            raise FormatMismatch(
                f"config.json declares the transform {named} of its inputs, and {list(weight.shape)} in "
                f"{weight.format} is not a plain matrix of a linear layer: {REMEDY}"
            )
        module = weight.name.removesuffix(WEIGHT_SUFFIX)
        matrix = self._find_matrix(transforms[0], module, weight.matrix[1])
        named = f"{transforms[0].group} ({transforms[0].matrix_type}, {matrix.n} columns)"
        undone = view_without_rotation(weight, f"its inputs are transformed by {named}, which is undone", matrix)
        may_be_other = role_of(module + WEIGHT_SUFFIX) == "experts" or module.rpartition(".")[2] in ROUTERS
        if weight.has_codes or transforms[0].is_at(module, False) or not may_be_other:
            return undone  # the module can only be a Linear
        return undone.with_alternatives([replace(weight, evidence=(UNTRANSFORMED, *weight.evidence))])

    def _find_matrix(self, transform: Transform, module: str, cols: int) -> TransformMatrix:
        called = f"the transform {display(transform.group)} of its inputs"
        if transform.matrix_type not in MATRIX_TYPES:
            raise FormatMismatch(
                f"config.json declares {called} as {display(transform.matrix_type)}; known are "
                f"{itemize(list(MATRIX_TYPES))}: {REMEDY}"
            )
        n = cols if transform.block is None else transform.block
        if not isinstance(n, int) or isinstance(n, bool) or n < 1 or cols % n:
            raise FormatMismatch(
                f"config.json declares {called} with head_dim {display(str(n))}, which does not divide its {cols} "
                f"columns: {REMEDY}"
            )
        is_hadamard = transform.matrix_type != RANDOM_MATRIX
        randomized = transform.randomized and is_hadamard
        is_transposed = is_hadamard and transform.inverse
        name = self._find_stored(transform, module, n)
        if name is None:
            if transform.matrix_type != HADAMARD or randomized or n & (n - 1):
                looked_for = f"{module}.{transform.group}_{INPUT}.weight"
                raise FormatMismatch(
                    f"config.json declares {called}, and its matrix {display(looked_for)}, [{n}, {n}], is not stored: "
                    f"{REMEDY}"
                )
            return TransformMatrix(n, None)
        entry = self._entries[name]
        if entry.shape != (n, n) or entry.dtype not in FLOAT_DTYPES:
            raise FormatMismatch(f"the matrix of {called}, {entry}, should be floats of [{n}, {n}]: {REMEDY}")
        return TransformMatrix(
            n, entry, self._find_permutation(name, n) if randomized else None, is_hadamard, is_transposed
        )

    def _find_stored(self, transform: Transform, module: str, n: int) -> str | None:
        """Return the name of a module's matrix: its stored one, or the only one of that size that it can share."""
        own_matrix = f"{module}.{transform.group}_{INPUT}.weight"
        if own_matrix in self._entries:
            return own_matrix
        shared = [
            name
            for name, other in self._matrices.get(transform.group, ())
            if self._entries[name].shape == (n, n)
            and (transform.matrix_type != RANDOM_MATRIX or other.inverse == transform.inverse)
        ]
        if len(shared) > 1:
            raise FormatMismatch(
                f"its inputs have the transform {display(transform.group)}; it stores no matrix, and could share any "
                f"of {itemize(shared, 3)}: {REMEDY}"
            )
        return shared[0] if shared else None

    def _find_permutation(self, matrix: str, n: int) -> Entry:
        name = matrix.removesuffix("weight") + "perm"
        entry = self._entries.get(name)
        if entry is None or entry.dtype != "I64" or entry.shape != (n,):
            raise FormatMismatch(
                f"its inputs have a transform with randomize, and the permutation {display(name)}, I64 [{n}], "
                + (f"is not stored: {REMEDY}" if entry is None else f"is stored as {entry}: {REMEDY}")
            )
        if sorted(read_integers(entry)) != list(range(n)):
            raise FormatMismatch(f"{entry} should hold each number from 0 to {n - 1} once: {REMEDY}")
        return entry


def _may_be_linear(weight: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and role_of(weight) not in NOT_LINEAR


class Rotation(Protocol):
    """A matrix that multiplies each run of ``n`` columns of rows, (r, c), in place."""

    @property
    def n(self) -> int:
        """The number of columns that are multiplied together."""

    def apply(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply inputs, as the model does."""

    def undo(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply inputs by the inverse."""

    def apply_to_weight(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Multiply a weight that takes such inputs, as its quantizer did."""

    def undo_in_weight(self, rows: Tensor, workspace: Workspace) -> Tensor:
        """Undo ``apply_to_weight``."""


def view_without_rotation(weight: Weight, what: str, matrix: Rotation) -> Weight:
    """Return a weight as it was before its columns were multiplied; ``what`` is the sentence for the evidence."""
    return replace(
        weight,
        dequantize=partial(_dequantize, weight, matrix),
        uniform_bits=None,
        levels=None,
        unit=None,
        rotated=RotatedWeight(weight, matrix.apply_to_weight, InputRotation(matrix.apply, matrix.undo)),
        evidence=(what, *weight.evidence),
        alternatives=tuple(view_without_rotation(other, what, matrix) for other in weight.alternatives),
        computed=True,
    )


def _dequantize(weight: Weight, matrix: Rotation, chunk: Chunk, workspace: Workspace) -> Values:
    """Dequantize whole runs of columns and multiply them by the matrix."""
    n = matrix.n
    whole = chunk._replace(col=chunk.col // n * n, stop_col=-(-chunk.stop_col // n) * n)
    whole_values = weight.dequantize(whole, workspace)
    values = matrix.undo_in_weight(whole_values.weight, workspace)
    if whole == chunk:
        return Values(values, whole_values.saturated)
    cropped = workspace.buffer("transformed_part", chunk.shape, values.dtype)
    return Values(cropped.copy_(values[:, chunk.col - whole.col : chunk.stop_col - whole.col]), whole_values.saturated)
