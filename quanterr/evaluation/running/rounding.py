"""Rounding of a candidate's inputs, keys and values as in its runtime, while a unit of its model runs.

This is fake quantization: products take the values of the codes, computed in float32. Everything else stays.
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
from quanterr.evaluation.measures.outputs_of_weights import energy, products_of, storage_of
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
from quanterr.util.text import count, display, listed

Turn = Callable[[Tensor], Tensor]

NONE, DECLARED = "none", "declared"
DECLARED_CACHE = "fp8"
# Units without a cache of keys and values: towers for images and sounds, and the encoder of an encoder-decoder model.
TOWER = re.compile(r"(.*\.)?(visual|vision\w*|audio\w*)\..*|(model\.)?encoder\..*")
LATENT = "kv_b_proj"  # expands what runtimes keep in place of keys and values


class Rounded(NamedTuple):
    """The rounding of the inputs of a weight: a scheme, its stored numbers, and the operations on inputs before it.

    In the dequantized weight, factors and rotation are undone, so they are undone in the rounded inputs as well.
    """

    scheme: InputScheme
    stored: StoredInputScale
    factors: Tensor | None = None  # (k,)
    turn: Turn | None = None  # rotates rows, (r, k) float32, in place
    branch: tuple[Tensor, Tensor] | None = None  # (rows, rank), (rank, k): takes unrounded inputs
    divides: bool = False  # factors divide inputs instead of multiplying them
    turn_back: Turn | None = None  # None: ``turn``

    def __call__(self, x: Tensor) -> Tensor:
        """Return inputs, (…, k), as the product sees them, in their own dtype."""
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
        found = F.linear(F.linear(rounded_away, down), up)
        if outputs is None:
            product += found
        else:
            product[..., outputs] += found
        return True

    def _scale(self, y: Tensor, divides: bool) -> Tensor:
        if self.factors is None:
            return y
        return torch.where(self.factors == 0, 0.0, y / self.factors) if divides else y * self.factors


def _rotate(turn: Turn | None, y: Tensor) -> Tensor:
    return y if turn is None else turn(y.reshape(-1, y.shape[-1]).clone()).view(y.shape)


class Watched(NamedTuple):
    """A parameter whose inputs are rounded, one way for each stored weight that makes it up."""

    parameter: str  # name in the model
    names: list[str]  # stored weights, by the original's names
    ways: list[Rounded | None]
    layout: list[tuple[int, int]]  # size and stride of each dimension
    owners: (
        Tensor | None
    )  # the parameter's shape with columns cut to 1: the index of the way; None if there is only one


def check_schemes(activations: str, kv: Iterable[str]) -> None:
    """Check that all names are known.

    Raises:
        UsageError: a name is not ``declared``, ``none`` or a scheme, or is given twice.
    """
    dynamic = [name for name, scheme in INPUT_SCHEMES.items() if not scheme.is_static]
    if activations not in (NONE, DECLARED, *dynamic):
        known = ", ".join(dynamic)
        raise UsageError(f"--activations {display(activations)}: choose one of {DECLARED}, {NONE}, {known}")
    caches = [one if one in (NONE, DECLARED) else parse_cache(one).name for one in kv]
    for n, one in enumerate(caches):
        if one in caches[:n]:
            raise UsageError(f"--kv {display(one)}: is given twice")


def list_caches(kv: Iterable[str]) -> list[str]:
    """Return the types that ``--kv`` names, without ``declared`` and ``none``."""
    return [one for one in kv if one not in (NONE, DECLARED)]


class Rounding:
    """All roundings of a candidate's runtime, by the original's names of weights."""

    def __init__(
        self, plan: Pairing, entries: Mapping[str, Entry], activations: str, kv: str, device: torch.device
    ) -> None:
        """Read the stored scales."""
        self._device, self._workspace = device, Workspace(torch.device("cpu"))
        self._turning = Workspace(device)
        self._rows = {pair.name: pair.original.matrix[0] for pair in plan.pairs}
        self._columns = {pair.name: pair.quantized.matrix[1] for pair in plan.pairs}
        self.inputs, self.why_not = dict[str, Rounded](), dict[str, str]()
        self.clamped: list[str] = []  # weights whose inputs have no stored scale
        self.used_otherwise = dict[str, None]()  # weights that the model uses outside of known products
        if activations == DECLARED:
            for name, found in find_declared_inputs(plan, entries).items():
                self._add(name, found)
        elif activations != NONE:
            scheme, nothing = INPUT_SCHEMES[activations], StoredInputScale()
            for pair in plan.pairs:
                if pair.quantized.has_codes and pair.quantized.matrix[0] > 1:
                    turn, back = self._turns(rotation_of(pair.quantized))
                    self.inputs[pair.name] = Rounded(scheme, nothing, turn=turn, turn_back=back)
        self.rotations = find_online_transforms(
            plan.labels["quantized"].config, [pair.quantized for pair in plan.pairs]
        )
        declared, scales = find_declared_cache(plan.labels["quantized"].config, entries)
        named = DECLARED_CACHE if declared and kv == DECLARED else kv
        self.cache = None if named in (NONE, DECLARED) else parse_cache(named)
        stored = find_cache_scales(plan.labels["quantized"].config, entries)
        of_heads = {one.name: one for one in stored.several} if stored.of_heads else {}
        self._scales = {name: self._tensor(one) for name, one in (scales | of_heads).items()} if self.cache else {}
        self._several = stored.several if self.cache and not stored.of_heads else []
        self._is_latent = any(f".{LATENT}." in name for name in self._rows)
        self.cached = 0  # how often keys and values were rounded
        self.noise = dict[str, float]()  # Σ of squared changes of outputs by rounded inputs, by parameter

    def _add(self, name: str, found: Inputs) -> None:
        if not found.scheme:
            self.why_not[name] = found.why_not
            return
        scale = None if found.scale is None else self._tensor(found.scale)
        if scale is not None and found.is_divisor:
            scale = 1 / scale
        if found.clamps:
            scale = torch.ones((), device=self._device)
            self.clamped.append(name)
        zero = None if found.zero_point is None else self._tensor(found.zero_point)
        stored_factors = found.divisors or found.factors
        factors = None if stored_factors is None else self._tensor(stored_factors).view(-1)[: self._columns[name]]
        turn, back = self._turns(found.rotation)
        stored = StoredInputScale(scale, zero, found.bound)
        branch = None if found.branch is None else found.branch.factors(self._turning)
        divides = found.divisors is not None
        self.inputs[name] = Rounded(INPUT_SCHEMES[found.scheme], stored, factors, turn, branch, divides, back)

    def _turns(self, rotation: InputRotation | None) -> tuple[Turn | None, Turn | None]:
        if rotation is None:
            return None, None
        return partial(_turn, rotation.rotate, self._turning), partial(_turn, rotation.undo, self._turning)

    def _tensor(self, entry: Entry) -> Tensor:
        pieces = [piece.flatten().float() for piece in iterate_scales(entry, self._workspace)]
        found = torch.cat(pieces).to(self._device)
        return found[0] if found.numel() == 1 else found

    @property
    def is_any(self) -> bool:
        """True if anything is rounded."""
        return bool(self.inputs) or self.cache is not None

    def reasons(self) -> list[str]:
        """Return why numbers may differ from the runtime that the files ask for."""
        return [*self.list_unrounded(), *self.list_untransformed()]

    def list_unrounded(self) -> list[str]:
        """Return messages about what should be rounded as in the runtime, but is not; empty if nothing should be."""
        found = []
        if self.why_not:
            name, why = next(iter(self.why_not.items()))
            found.append(f"inputs of {count(len(self.why_not), 'weight')} were not rounded: {display(name)}: {why}")
        if self.used_otherwise:
            name, number = next(iter(self.used_otherwise)), count(len(self.used_otherwise), "weight")
            why = "the model multiplies by it in an unknown way"
            found.append(f"inputs of {number} were not rounded: {display(name)}: {why}")
        if self.cache and not self.cached:
            found.append("keys and values were not rounded: this model does not use torch's own attention")
        elif self.cache and self._is_latent:
            found.append(f"keys and values were rounded behind {LATENT}: runtimes keep what is in front of it")
        if self._several:
            one = self._several[0]
            found.append(f"keys and values were rounded with a scale of 1: {display(one.name)} holds {one.n:,} numbers")
        return found

    def list_untransformed(self) -> list[str]:
        """Return a message if the runtime transforms inputs in a way that is not emulated, whatever is rounded."""
        if not self.rotations:
            return []
        return [f"config.json declares transforms at run time that are not emulated: {listed(self.rotations, 3)}"]

    @property
    def schemes(self) -> dict[str, int]:
        """The number of weights of each scheme."""
        return dict(Counter(one.scheme.name for one in self.inputs.values()))

    def of_unit(self, unit: Unit, names: Names, measures: bool = False) -> "RoundingMode":
        """Return the mode in which to run a unit of the candidate, whose weights are loaded.

        With ``measures``, the change of the outputs is added to ``noise``, which takes a second run of each product.
        """
        watched = {storage_of(slot.tensor): found for slot in unit.slots if (found := self._watched(slot, names))}
        scales = [self._scale(unit.name, endings) for endings in (KEY_SCALES, VALUE_SCALES)]
        caches = self.cache is not None and not TOWER.fullmatch(unit.name)
        return RoundingMode(watched, scales if caches else None, self, measures)

    def _watched(self, slot: Slot, names: Names) -> Watched | None:
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
        """Return the scale of a block's keys or values, or the one for both; 1 if none is stored, as in runtimes."""
        of_unit = {name: scale for name, scale in self._scales.items() if f".{unit}." in f".{name}"}
        found = (scale for one in (*endings, SHARED_SCALE) for name, scale in of_unit.items() if name.endswith(one))
        return next(found, torch.ones((), device=self._device))


def _turn(turn: Callable[[Tensor, Workspace], Tensor], workspace: Workspace, rows: Tensor) -> Tensor:
    return turn(rows, workspace)


class RoundingMode(TorchFunctionMode):
    """Rounds the inputs of products with watched weights, and what attention reads from the cache."""

    def __init__(
        self,
        weights: Mapping[int, Watched],
        scales: Sequence[Tensor] | None,
        owner: Rounding,
        measures: bool = False,
    ) -> None:
        """Keep ``weights``, by the storage of each parameter, and the scales of keys and values; None: not rounded."""
        super().__init__()
        self._weights, self._scales, self._owner, self._measures = weights, scales, owner, measures
        self._last: tuple[Tensor, Rounded, Tensor] | None = None  # reused, as several weights have the same inputs

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._scales is not None and function is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                args, kwargs = self._with_cache(args, kwargs, self._scales)
        elif self._weights:
            for values, weight, transposed in products_of(function, args):
                watched = self._weights.get(storage_of(weight))
                if watched is not None:
                    if not values.is_floating_point():
                        break
                    ways = _ways(watched, weight, transposed)
                    product = self._multiply(function, args, kwargs, values, watched, ways)
                    if self._measures:
                        noise = energy(product - function(*args, **kwargs))
                        self._owner.noise[watched.parameter] = self._owner.noise.get(watched.parameter, 0.0) + noise
                    return product
            else:
                return self._look(args, function(*args, **kwargs))
        return function(*args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._last = None  # their memory is needed

    def _multiply(self, function: Any, args: Any, kwargs: Any, values: Tensor, watched: Watched, ways: "_Ways") -> Any:
        """Compute a product once for each way of rounding its inputs, and take from each the outputs that use it."""
        found = None
        for way, outputs in ways:
            given = values if way is None else self._round(values, way)
            product = function(*(given if each is values else each for each in args), **kwargs)
            if way is not None and way.branch is not None and not way.add_branch(product, values - given, outputs):
                self._owner.used_otherwise |= dict.fromkeys(watched.names)
            found = product if found is None or outputs is None else torch.where(outputs, product, found)
        return found

    def _round(self, values: Tensor, way: Rounded) -> Tensor:
        if self._last is not None and self._last[0] is values and _is_same(self._last[1], way):
            return self._last[2]
        found = way(values)
        self._last = values, way, found
        return found

    def _look(self, args: Iterable[object], result: object) -> object:
        """Note weights that are used outside of known products: their inputs are not rounded."""
        if not (isinstance(result, Tensor) and result.is_floating_point() and result.numel()):
            return result
        for weight in _tensors(args):
            watched = self._weights.get(storage_of(weight))
            if watched is not None and storage_of(result) != storage_of(weight):
                self._owner.used_otherwise |= dict.fromkeys(watched.names)
        return result

    def _with_cache(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], scales: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, named = list(args), dict(kwargs)
        assert self._owner.cache is not None  # noqa: S101 - there are scales
        kept = self._owner.cache.keys, self._owner.cache.values
        for place, name, one, scale in zip((1, 2), ("key", "value"), kept, scales, strict=True):
            if one is None:
                continue
            if len(given) > place:
                given[place] = one(given[place], _of_heads(scale, given[place]))
            else:
                named[name] = one(named[name], _of_heads(scale, named[name]))
        self._owner.cached += 1
        return tuple(given), named


def _of_heads(scale: Tensor, x: Tensor) -> Tensor:
    """Return the scales of heads as (1, heads, 1, 1), repeated as keys and values (n, heads, tokens, size) are.

    Raises:
        CheckpointError: there is another number of heads.
    """
    if scale.dim() == 0:
        return scale
    heads = x.shape[1]
    if heads % len(scale):
        raise CheckpointError(f"{len(scale):,} scales of keys or values are stored for {heads:,} heads")
    return scale.repeat_interleave(heads // len(scale)).view(1, -1, 1, 1)


_Ways = list[tuple[Rounded | None, Tensor | None]]  # a way, and the outputs that use it, (n,) bool; None: all


def _ways(watched: Watched, weight: Tensor, transposed: bool) -> _Ways:
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


def _is_same(one: Rounded | None, other: Rounded | None) -> bool:
    """Return whether two roundings are the same."""
    if one is None or other is None or one is other:
        return one is other
    plain = all(each is None for way in (one, other) for each in (way.factors, way.turn, way.branch))
    if one.scheme is not other.scheme or not plain:
        return False
    pairs = zip(one.stored, other.stored, strict=True)
    return all(a is b or (a is not None and b is not None and bool(torch.as_tensor(a == b).all())) for a, b in pairs)


def _tensors(args: Iterable[object]) -> Iterator[Tensor]:
    for each in args:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from _tensors(each)


def of_rounding(rounding: Rounding) -> Iterator[Finding]:
    """Yield findings about roundings that are not emulated, and about inputs that a runtime clamps without a scale."""
    for why in rounding.list_unrounded():
        remedy = "evaluate with --activations none --kv none, or in the runtime"
        yield make_finding("not_emulated", "warning", None, why, remedy)
    for why in rounding.list_untransformed():
        yield make_finding("not_emulated", "warning", None, why, "evaluate in the runtime, or export without them")
    yield from report_missing_input_scales(rounding.clamped)
