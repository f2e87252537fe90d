"""While a candidate's unit runs: its inputs and its keys and values are rounded as a runtime would round them.

Fake quantization: what codes stand for, computed in float32, goes into the products; all else stays.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.checkpoints import Entry
from quanterr.errors import UsageError
from quanterr.evaluation.names import Names
from quanterr.evaluation.states import products_of, storage_of
from quanterr.evaluation.units import Unit
from quanterr.findings import make_finding
from quanterr.findings.activations import report_missing_input_scales
from quanterr.formats.shared.scale_grid import iterate_scales
from quanterr.pairing.inputs import Inputs, find_declared_cache, find_declared_inputs
from quanterr.pairing.model import Pairing
from quanterr.recipes.inputs import INPUT_SCHEMES, InputScheme, StoredInputScale
from quanterr.report.base import Finding
from quanterr.tensors.workspace import Workspace
from quanterr.util.text import count, display

NONE, DECLARED = "none", "declared"
CACHE = ("fp8",)
OF_KEYS, OF_VALUES = (".k_scale", "k_proj.output_scale"), (".v_scale", "v_proj.output_scale")


class Rounded(NamedTuple):
    """How the inputs of a weight are rounded: a scheme, what is stored for it, factors that come first."""

    scheme: InputScheme
    stored: StoredInputScale
    factors: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Inputs, (…, k), as the product sees them; factors are part of the dequantized weight, and undone here."""
        if self.factors is None:
            return self.scheme(x, self.stored)
        return self.scheme(x * self.factors, self.stored) / self.factors


def checked(activations: str, kv: str) -> None:
    """Refuse names that are none.

    Raises:
        UsageError: such a name.
    """
    dynamic = [name for name, scheme in INPUT_SCHEMES.items() if not scheme.is_static]
    for option, given, known in (("--activations", activations, dynamic), ("--kv", kv, CACHE)):
        if given not in (NONE, DECLARED, *known):
            raise UsageError(f"{option} {display(given)}: choose one of {DECLARED}, {NONE}, {', '.join(known)}")


class Rounding:
    """What a candidate's runtime rounds, by the original's names of weights."""

    def __init__(
        self, plan: Pairing, entries: Mapping[str, Entry], activations: str, kv: str, device: torch.device
    ) -> None:
        """Read the stored scales."""
        self._device, self._workspace = device, Workspace(torch.device("cpu"))
        self.inputs, self.why_not = dict[str, Rounded](), dict[str, str]()
        self.clamped: list[str] = []  # weights whose inputs have no stored scale
        if activations == DECLARED:
            for name, found in find_declared_inputs(plan, entries).items():
                self._add(name, found)
        elif activations != NONE:
            coded = [pair for pair in plan.pairs if pair.quantized.has_codes and pair.quantized.matrix[0] > 1]
            self.inputs = {pair.name: Rounded(INPUT_SCHEMES[activations], StoredInputScale()) for pair in coded}
        declared, scales = find_declared_cache(plan.labels["quantized"].config, entries)
        self.rounds_cache = kv != NONE if kv != DECLARED else declared
        self._cache = {name: self._number(entry) for name, entry in scales.items()} if self.rounds_cache else {}
        self.cached = 0  # how often keys and values were rounded

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
        factors = None if found.factors is None else self._tensor(found.factors)
        self.inputs[name] = Rounded(INPUT_SCHEMES[found.scheme], StoredInputScale(scale, zero, found.bound), factors)

    def _tensor(self, entry: Entry) -> Tensor:
        pieces = [piece.flatten().float() for piece in iterate_scales(entry, self._workspace)]
        found = torch.cat(pieces).to(self._device)
        return found[0] if found.numel() == 1 else found

    def _number(self, entry: Entry) -> float:
        return float(self._tensor(entry))

    @property
    def is_any(self) -> bool:
        """Whether anything is rounded."""
        return bool(self.inputs) or self.rounds_cache

    def reasons(self) -> list[str]:
        """Why numbers are not those of the runtime that its files ask for."""
        found = []
        if self.why_not:
            name, why = next(iter(self.why_not.items()))
            found.append(f"inputs of {count(len(self.why_not), 'weight')} were not rounded: {display(name)}: {why}")
        if self.rounds_cache and not self.cached:
            found.append("keys and values were not rounded: this model's attention is none of torch's own")
        return found

    @property
    def schemes(self) -> dict[str, int]:
        """How many weights each scheme has."""
        return dict(Counter(one.scheme.name for one in self.inputs.values()))

    def of_unit(self, unit: Unit, names: Names) -> "RoundingMode":
        """The mode in which a unit of the candidate runs; its weights are loaded."""
        found = {}
        for slot in unit.slots:
            own = [self.inputs[source] for source in names.sources(slot.name) if source in self.inputs]
            if own and slot.tensor.dim() > 1:
                found[storage_of(slot.tensor)] = _fused(own)
        keys, values = (self._scale(unit.name, endings) for endings in (OF_KEYS, OF_VALUES))
        return RoundingMode(found, (keys, values) if self.rounds_cache else None, self)

    def _scale(self, unit: str, endings: Sequence[str]) -> float:
        """The scale of a block's keys or values; 1 where none is stored, as runtimes take it."""
        own = (
            scale for name, scale in self._cache.items() if f".{unit}." in f".{name}" and name.endswith(tuple(endings))
        )
        return next(own, 1.0)


def _fused(own: Sequence[Rounded]) -> Rounded:
    """Of a parameter that several stored weights make up: the widest range, as runtimes take one for all."""
    first = own[0]
    scales = [one.stored.scale for one in own if one.stored.scale is not None]
    if len(scales) < 2 or any(scale.numel() > 1 for scale in scales):
        return first
    widest = torch.stack(scales).amin() if first.scheme.name == "nvfp4" else torch.stack(scales).amax()
    return first._replace(stored=first.stored._replace(scale=widest))


class RoundingMode(TorchFunctionMode):
    """Rounds the inputs of products with watched weights, and what attention reads from the cache."""

    def __init__(self, weights: Mapping[int, Rounded], cache: tuple[float, float] | None, owner: Rounding) -> None:
        """``weights`` by the storage of each, ``cache`` the scales of keys and values."""
        super().__init__()
        self._weights, self._cache, self._owner = weights, cache, owner
        self._last: tuple[Tensor, Rounded, Tensor] | None = None  # several weights have the same inputs

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._cache is not None and function is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                args, kwargs = self._with_cache(args, kwargs)
        elif self._weights:
            for values, weight, _ in products_of(function, args):
                rounded = self._weights.get(storage_of(weight))
                if rounded is not None and values.is_floating_point():
                    with torch._C.DisableTorchFunction():
                        args = tuple(self._of(values, rounded) if each is values else each for each in args)
        return function(*args, **kwargs)

    def forget(self) -> None:
        """Let go of the last inputs: their memory is needed."""
        self._last = None

    def _of(self, values: Tensor, rounded: Rounded) -> Tensor:
        if self._last is not None and self._last[0] is values and _same(self._last[1], rounded):
            return self._last[2]
        found = rounded(values)
        self._last = values, rounded, found
        return found

    def _with_cache(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, named = list(args), dict(kwargs)
        assert self._cache is not None  # noqa: S101 - the caller has looked
        for place, name, scale in ((1, "key", self._cache[0]), (2, "value", self._cache[1])):
            of = torch.tensor(scale)
            if len(given) > place:
                given[place] = CACHE_SCHEME(given[place], StoredInputScale(of))
            else:
                named[name] = CACHE_SCHEME(named[name], StoredInputScale(of))
        self._owner.cached += 1
        return tuple(given), named


CACHE_SCHEME = INPUT_SCHEMES["fp8_static"]


def _same(one: Rounded, other: Rounded) -> bool:
    """Whether both round alike."""
    if one is other:
        return True
    if one.scheme is not other.scheme or one.factors is not None or other.factors is not None:
        return False
    pairs = zip(one.stored, other.stored, strict=True)
    return all(a is b or (a is not None and b is not None and bool(torch.as_tensor(a == b).all())) for a, b in pairs)


def of_rounding(rounding: Rounding) -> Iterator[Finding]:
    """What is not emulated, and inputs that a runtime clamps for want of a scale."""
    for why in rounding.reasons():
        yield make_finding(
            "not_emulated", "warning", None, why, "evaluate with --activations none --kv none, or in the runtime"
        )
    yield from report_missing_input_scales(rounding.clamped)
