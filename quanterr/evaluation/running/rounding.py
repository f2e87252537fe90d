"""Rounding of a candidate's inputs, keys and values as in its runtime, while units of its model run.

This is fake quantization: weights are multiplied by the values of the codes, in float32. Nothing else is rounded.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.checkpoints import Entry
from quanterr.documents.base import Finding
from quanterr.errors import CheckpointError, UsageError
from quanterr.evaluation.measures.outputs_of_weights import products_of, storage_of, sum_squares
from quanterr.evaluation.models.names import Names
from quanterr.evaluation.models.units import Slot, Unit
from quanterr.findings import make_finding
from quanterr.findings.inputs import report_missing_input_scales
from quanterr.formats.base import InputRotation
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.pairing.inputs import (
    KEY_SCALES,
    SHARED_SCALE,
    VALUE_SCALES,
    Inputs,
    find_cache_scales,
    find_declared_cache,
    find_declared_inputs,
    rotation_of,
)
from quanterr.pairing.model import Pairing
from quanterr.pairing.transforms import find_online_transforms
from quanterr.recipes.caches import parse_cache
from quanterr.recipes.inputs import INPUT_SCHEMES, InputScheme, StoredInputScale
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, display, itemize

Rotate = Callable[[Tensor], Tensor]

NONE, DECLARED = "none", "declared"
DECLARED_CACHE = "fp8"
# Units whose keys and values are not cached: towers for images and sounds, and encoders of encoder-decoder models.
UNIT_WITHOUT_CACHE = re.compile(r"(.*\.)?(visual|vision\w*|audio\w*)\..*|(model\.)?encoder\..*")
LATENT_EXPANSION = "kv_b_proj"  # computes keys and values from the latent that runtimes cache


class Rounded(NamedTuple):
    """The rounding of the inputs of a weight: a scheme, its stored numbers, and the operations on inputs before it.

    Factors and rotation are undone in the dequantized weight, so they are also undone in the rounded inputs.
    """

    scheme: InputScheme
    stored: StoredInputScale
    factors: Tensor | None = None  # (k,)
    turn: Rotate | None = None  # rotates rows, (r, k) float32, in place
    branch: tuple[Tensor, Tensor] | None = None  # (rows, rank), (rank, k): takes unrounded inputs
    divides: bool = False  # factors divide inputs instead of multiplying them
    turn_back: Rotate | None = None  # None: ``turn``

    def __call__(self, x: Tensor) -> Tensor:
        """Return inputs, (…, k), as they are multiplied by the weight, in their own dtype."""
        y = self.scheme(_rotate(self.turn, self._scale(x.float(), self.divides)), self.stored)
        return self._scale(_rotate(self.turn_back or self.turn, y), not self.divides).to(x.dtype)

    def add_branch(self, product: Tensor, rounded_away: Tensor, outputs: Tensor | None) -> bool:
        """Add the branch's product with ``rounded_away``, (…, k), to a product, in place.

        ``outputs``, (n,) bool, marks the branch's outputs; None: all. Return False if the branch has more or fewer.
        """
        assert self.branch is not None  # noqa: S101 - the caller has checked
        up, down = (each.to(product.dtype) for each in self.branch)
        n = product.shape[-1] if outputs is None else int(outputs.sum())
        if len(up) != n:
            return False
        product_of_branch = F.linear(F.linear(rounded_away, down), up)
        if outputs is None:
            product += product_of_branch
        else:
            product[..., outputs] += product_of_branch
        return True

    def _scale(self, y: Tensor, divides: bool) -> Tensor:
        if self.factors is None:
            return y
        return torch.where(self.factors == 0, 0.0, y / self.factors) if divides else y * self.factors


def _rotate(turn: Rotate | None, y: Tensor) -> Tensor:
    return y if turn is None else turn(y.reshape(-1, y.shape[-1]).clone()).view(y.shape)


class Watched(NamedTuple):
    """A parameter whose inputs are rounded, perhaps differently for each stored weight that makes it up."""

    parameter: str  # name in the model
    names: list[str]  # stored weights, by the original's names
    ways: list[Rounded | None]
    layout: list[tuple[int, int]]  # size and stride of each dimension
    # Index of the way for each row, in the parameter's shape with one column; None if there is only one way.
    owners: Tensor | None


def check_schemes(activations: str, kv: Iterable[str]) -> None:
    """Check that all names are known.

    Raises:
        UsageError: a name is not ``declared``, ``none`` or a scheme, or is given twice.
    """
    dynamic = [name for name, scheme in INPUT_SCHEMES.items() if not scheme.is_static]
    if activations not in (NONE, DECLARED, *dynamic):
        known = ", ".join(dynamic)
        raise UsageError(f"--activations {display(activations)}: choose one of {DECLARED}, {NONE}, {known}")
    caches = [cache if cache in (NONE, DECLARED) else parse_cache(cache).name for cache in kv]
    for n, cache in enumerate(caches):
        if cache in caches[:n]:
            raise UsageError(f"--kv {display(cache)}: is given twice")


def list_caches(kv: Iterable[str]) -> list[str]:
    """Return the types that ``--kv`` names, without ``declared`` and ``none``."""
    return [name for name in kv if name not in (NONE, DECLARED)]


class Rounding:
    """How a candidate's runtime rounds inputs, by the original's names of weights, and keys and values."""

    def __init__(
        self, plan: Pairing, entries: Mapping[str, Entry], activations: str, kv: str, device: torch.device
    ) -> None:
        """Read the stored scales."""
        self._device, self._workspace = device, Workspace(torch.device("cpu"))
        self._turning = Workspace(device)
        self._rows = {pair.name: pair.original.matrix[0] for pair in plan.pairs}
        self._columns = {pair.name: pair.quantized.matrix[1] for pair in plan.pairs}
        self.inputs, self.why_not = dict[str, Rounded](), dict[str, str]()
        self.clamped: list[str] = []  # weights whose inputs are clamped because no scale is stored
        self.used_otherwise = dict[str, None]()  # weights that the model uses in unknown functions
        if activations == DECLARED:
            for name, inputs in find_declared_inputs(plan, entries).items():
                self._add(name, inputs)
        elif activations != NONE:
            scheme, nothing = INPUT_SCHEMES[activations], StoredInputScale()
            for pair in plan.pairs:
                if pair.quantized.has_codes and pair.quantized.matrix[0] > 1:
                    turn, back = self._make_rotations(rotation_of(pair.quantized))
                    self.inputs[pair.name] = Rounded(scheme, nothing, turn=turn, turn_back=back)
        self.rotations = find_online_transforms(
            plan.labels["quantized"].config, [pair.quantized for pair in plan.pairs]
        )
        declared, scales = find_declared_cache(plan.labels["quantized"].config, entries)
        named = DECLARED_CACHE if declared and kv == DECLARED else kv
        self.cache = None if named in (NONE, DECLARED) else parse_cache(named)
        stored = find_cache_scales(plan.labels["quantized"].config, entries)
        of_heads = {entry.name: entry for entry in stored.several} if stored.of_heads else {}
        self._scales = (
            {name: self._read_numbers(entry) for name, entry in (scales | of_heads).items()} if self.cache else {}
        )
        self._several = stored.several if self.cache and not stored.of_heads else []
        self._is_latent = any(f".{LATENT_EXPANSION}." in name for name in self._rows)
        self.cached = 0  # how often keys and values were rounded
        self.noise = dict[str, float]()  # Σ of squared changes of outputs by rounded inputs, by parameter

    def _add(self, name: str, inputs: Inputs) -> None:
        if not inputs.scheme:
            self.why_not[name] = inputs.why_not
            return
        scale = None if inputs.scale is None else self._read_numbers(inputs.scale)
        if scale is not None and inputs.is_divisor:
            scale = 1 / scale
        if inputs.clamps:
            scale = torch.ones((), device=self._device)
            self.clamped.append(name)
        zero = None if inputs.zero_point is None else self._read_numbers(inputs.zero_point)
        stored_factors = inputs.divisors or inputs.factors
        factors = None if stored_factors is None else self._read_numbers(stored_factors).view(-1)[: self._columns[name]]
        turn, back = self._make_rotations(inputs.rotation)
        stored = StoredInputScale(scale, zero, inputs.bound)
        branch = None if inputs.branch is None else inputs.branch.factors(self._turning)
        divides = inputs.divisors is not None
        self.inputs[name] = Rounded(INPUT_SCHEMES[inputs.scheme], stored, factors, turn, branch, divides, back)

    def _make_rotations(self, rotation: InputRotation | None) -> tuple[Rotate | None, Rotate | None]:
        if rotation is None:
            return None, None
        return partial(_apply_rotation, rotation.rotate, self._turning), partial(
            _apply_rotation, rotation.undo, self._turning
        )

    def _read_numbers(self, entry: Entry) -> Tensor:
        pieces = [piece.flatten().float() for piece in iterate_scales(entry, self._workspace)]
        numbers = torch.cat(pieces).to(self._device)
        return numbers[0] if numbers.numel() == 1 else numbers

    @property
    def is_any(self) -> bool:
        """True if anything is rounded."""
        return bool(self.inputs) or self.cache is not None

    def reasons(self) -> list[str]:
        """Return the reasons why results may differ from those of the declared runtime."""
        return [*self.list_unrounded(), *self.list_untransformed()]

    def list_unrounded(self) -> list[str]:
        """Return messages about inputs, keys and values that the runtime rounds and that were not rounded."""
        messages = []
        if self.why_not:
            name, why = next(iter(self.why_not.items()))
            messages.append(f"inputs of {count(len(self.why_not), 'weight')} were not rounded: {display(name)}: {why}")
        if self.used_otherwise:
            name, number = next(iter(self.used_otherwise)), count(len(self.used_otherwise), "weight")
            why = "the model multiplies by it in an unknown way"
            messages.append(f"inputs of {number} were not rounded: {display(name)}: {why}")
        if self.cache and not self.cached:
            messages.append("keys and values were not rounded: this model does not use torch's own attention")
        elif self.cache and self._is_latent:
            messages.append(f"keys and values were rounded after {LATENT_EXPANSION}, although runtimes cache its input")
        if self._several:
            entry = self._several[0]
            messages.append(
                f"keys and values were rounded with a scale of 1: {display(entry.name)} holds {entry.n:,} numbers"
            )
        return messages

    def list_untransformed(self) -> list[str]:
        """Return a message if the runtime transforms inputs in a way that is not emulated."""
        if not self.rotations:
            return []
        return [f"config.json declares transforms at run time that are not emulated: {itemize(self.rotations, 3)}"]

    @property
    def schemes(self) -> dict[str, int]:
        """The number of weights of each scheme."""
        return dict(Counter(rounded.scheme.name for rounded in self.inputs.values()))

    def of_unit(self, unit: Unit, names: Names, measures: bool = False) -> "RoundingMode":
        """Return the mode in which to run a unit of the candidate, whose weights are loaded.

        With ``measures``, the change of the outputs is added to ``noise``, which takes a second run of each product.
        """
        watched = {
            storage_of(slot.tensor): watched_parameter
            for slot in unit.slots
            if (watched_parameter := self._watch_slot(slot, names))
        }
        scales = [self._scale(unit.name, endings) for endings in (KEY_SCALES, VALUE_SCALES)]
        caches = self.cache is not None and not UNIT_WITHOUT_CACHE.fullmatch(unit.name)
        return RoundingMode(watched, scales if caches else None, self, measures)

    def _watch_slot(self, slot: Slot, names: Names) -> Watched | None:
        sources = names.sources(slot.name)
        ways = [self.inputs.get(source) for source in sources]
        if slot.tensor.dim() < 2 or not any(ways):
            return None
        named = [source for source in sources if source in self.inputs]
        layout = list(zip(slot.tensor.shape, slot.tensor.stride(), strict=True))
        if all(_is_same(way, ways[0]) for way in ways):
            return Watched(slot.name, named, ways[:1], layout, None)

        def index(source: str) -> Tensor:
            return torch.full((self._rows[source], 1), sources.index(source), dtype=torch.float32)

        return Watched(slot.name, named, ways, layout, names.tensors([slot.name], index)[slot.name].long())

    def _scale(self, unit: str, endings: Sequence[str]) -> Tensor:
        """Return the scale of a block's keys or values, or that for both; 1 if none is stored, as runtimes do."""
        of_unit = {name: scale for name, scale in self._scales.items() if f".{unit}." in f".{name}"}
        scales = (
            scale for ending in (*endings, SHARED_SCALE) for name, scale in of_unit.items() if name.endswith(ending)
        )
        return next(scales, torch.ones((), device=self._device))


def _apply_rotation(turn: Callable[[Tensor, Workspace], Tensor], workspace: Workspace, rows: Tensor) -> Tensor:
    return turn(rows, workspace)


class RoundingMode(TorchFunctionMode):
    """Rounds the inputs of watched weights, and the keys and values that attention reads."""

    def __init__(
        self,
        weights: Mapping[int, Watched],
        scales: Sequence[Tensor] | None,
        owner: Rounding,
        measures: bool = False,
    ) -> None:
        """Take ``weights`` by the storage of each parameter, and scales of keys and values (None: not rounded)."""
        super().__init__()
        self._weights, self._scales, self._owner, self._measures = weights, scales, owner, measures
        self._last: tuple[Tensor, Rounded, Tensor] | None = None  # reused, as several weights have the same inputs

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._scales is not None and function is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                args, kwargs = self._round_cache(args, kwargs, self._scales)
        elif self._weights:
            for values, weight, transposed in products_of(function, args):
                watched = self._weights.get(storage_of(weight))
                if watched is not None:
                    if not values.is_floating_point():
                        break
                    ways = _find_ways(watched, weight, transposed)
                    product = self._multiply(function, args, kwargs, values, watched, ways)
                    if self._measures:
                        noise = sum_squares(product - function(*args, **kwargs))
                        self._owner.noise[watched.parameter] = self._owner.noise.get(watched.parameter, 0.0) + noise
                    return product
            else:
                return self._look(args, function(*args, **kwargs))
        return function(*args, **kwargs)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        self._last = None  # their memory is needed

    def _multiply(self, function: Any, args: Any, kwargs: Any, values: Tensor, watched: Watched, ways: "_Ways") -> Any:
        """Compute a product for each way of rounding its inputs, and take from each the outputs that it applies to."""
        combined = None
        for way, outputs in ways:
            given = values if way is None else self._round(values, way)
            product = function(*(given if each is values else each for each in args), **kwargs)
            if way is not None and way.branch is not None and not way.add_branch(product, values - given, outputs):
                self._owner.used_otherwise |= dict.fromkeys(watched.names)
            combined = product if combined is None or outputs is None else torch.where(outputs, product, combined)
        return combined

    def _round(self, values: Tensor, way: Rounded) -> Tensor:
        if self._last is not None and self._last[0] is values and _is_same(self._last[1], way):
            return self._last[2]
        rounded = way(values)
        self._last = values, way, rounded
        return rounded

    def _look(self, args: Iterable[object], result: object) -> object:
        """Record weights that are used in unknown functions, whose inputs are not rounded."""
        if not (isinstance(result, Tensor) and result.is_floating_point() and result.numel()):
            return result
        for weight in _list_tensors(args):
            watched = self._weights.get(storage_of(weight))
            if watched is not None and storage_of(result) != storage_of(weight):
                self._owner.used_otherwise |= dict.fromkeys(watched.names)
        return result

    def _round_cache(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], scales: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, named = list(args), dict(kwargs)
        assert self._owner.cache is not None  # noqa: S101 - there are scales
        kept = self._owner.cache.keys, self._owner.cache.values
        for place, name, round_values, scale in zip((1, 2), ("key", "value"), kept, scales, strict=True):
            if round_values is None:
                continue
            if len(given) > place:
                given[place] = round_values(given[place], _repeat_scales(scale, given[place]))
            else:
                named[name] = round_values(named[name], _repeat_scales(scale, named[name]))
        self._owner.cached += 1
        return tuple(given), named


def _repeat_scales(scale: Tensor, x: Tensor) -> Tensor:
    """Return the scales of heads as (1, heads, 1, 1), repeated as keys and values (n, heads, tokens, size) are.

    Raises:
        CheckpointError: the number of scales differs from the number of heads.
    """
    if scale.dim() == 0:
        return scale
    heads = x.shape[1]
    if heads % len(scale):
        raise CheckpointError(f"{len(scale):,} scales of keys or values are stored for {heads:,} heads")
    return scale.repeat_interleave(heads // len(scale)).view(1, -1, 1, 1)


_Ways = list[tuple[Rounded | None, Tensor | None]]  # a way, and the outputs that it applies to, (n,) bool; None: all


def _find_ways(watched: Watched, weight: Tensor, transposed: bool) -> _Ways:
    """Return how the inputs of a parameter, or of a part of it, are rounded."""
    if watched.owners is None:
        return [(watched.ways[0], None)]
    axis = 1 if transposed else 0
    first, step = int(weight.storage_offset()), int(weight.stride(axis))
    places = first + step * torch.arange(weight.shape[axis])  # offsets of the outputs in storage
    at = [
        places.div(stride, rounding_mode="floor") % size if kept == size else torch.zeros_like(places)
        for (size, stride), kept in zip(watched.layout, watched.owners.shape, strict=True)
    ]
    owners = watched.owners[tuple(at)]
    several: list[tuple[Rounded | None, Tensor]] = []
    for index in sorted(set(owners.tolist())):
        way, mine = watched.ways[index], owners == index
        same = next((n for n, (other, _) in enumerate(several) if _is_same(way, other)), None)
        if same is None:
            several.append((way, mine))
        else:
            several[same] = way, several[same][1] | mine
    return [(several[0][0], None)] if len(several) == 1 else [(way, mine.to(weight.device)) for way, mine in several]


def _is_same(first: Rounded | None, second: Rounded | None) -> bool:
    """Return whether two roundings are the same."""
    if first is None or second is None or first is second:
        return first is second
    plain = all(each is None for way in (first, second) for each in (way.factors, way.turn, way.branch))
    if first.scheme is not second.scheme or not plain:
        return False
    pairs = zip(first.stored, second.stored, strict=True)
    return all(a is b or (a is not None and b is not None and bool(torch.as_tensor(a == b).all())) for a, b in pairs)


def _list_tensors(args: Iterable[object]) -> Iterator[Tensor]:
    for each in args:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from _list_tensors(each)


def of_rounding(rounding: Rounding) -> Iterator[Finding]:
    """Yield findings about roundings that are not emulated, and about inputs that a runtime clamps without a scale."""
    for why in rounding.list_unrounded():
        remedy = "evaluate with --activations none --kv none, or in the runtime"
        yield make_finding("not_emulated", "warning", None, why, remedy)
    for why in rounding.list_untransformed():
        yield make_finding("not_emulated", "warning", None, why, "evaluate in the runtime, or export without them")
    yield from report_missing_input_scales(rounding.clamped)
