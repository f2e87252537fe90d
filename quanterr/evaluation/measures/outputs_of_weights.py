"""Errors of the outputs of weights, summed over all inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, inf, log
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.overrides import TorchFunctionMode

from quanterr.evaluation.measures.gram import Gram
from quanterr.evaluation.models.units import Unit
from quanterr.tensors.products import multiply

SLAB_ELEMENTS = 1 << 22  # number of elements of an output whose error is computed at once


class Norms(NamedTuple):
    """Norms ‖x‖ of inputs: the largest one, and the sum of ln ‖x‖ and number of those that are not zero."""

    largest: float
    logs: float
    nonzero: int

    @property
    def spread(self) -> float | None:
        """The largest ‖x‖ divided by the geometric mean of nonzero ‖x‖, which a few large inputs hardly change."""
        return exp(log(self.largest) - self.logs / self.nonzero) if 0 < self.largest < inf else None

    def merge(self, other: "Norms") -> "Norms":
        """Return the norms of these inputs and of others."""
        return Norms(max(self.largest, other.largest), self.logs + other.logs, self.nonzero + other.nonzero)


NO_NORMS = Norms(0.0, 0.0, 0)


def norms_of(x: Tensor) -> Norms:
    """Return the norms of inputs (n, columns)."""
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    norms = norms[norms > 0].double()
    if not norms.numel():
        return NO_NORMS
    return Norms(float(norms.max()), float(norms.log().sum()), norms.numel())


@dataclass
class Product:
    """The output of one weight: ‖X Wᵀ‖² over all inputs, and ‖X Eᵀ‖² of each candidate's error E."""

    signal: float
    noise: list[float]
    is_stack: bool  # the weight has a matrix for each expert
    moments: Tensor | None = None  # (columns,) Σ of squares of inputs
    sums: Tensor | None = None  # (columns,) Σ of inputs
    inputs: int = 0
    transposed: bool = False  # the weight is stored [in, out]
    norms: Norms = NO_NORMS  # norms of the inputs

    def add(self, other: "Product") -> None:
        """Add the sums over other inputs."""
        self.signal += other.signal
        self.noise = [noise + more for noise, more in zip(self.noise, other.noise, strict=True)]
        self.inputs += other.inputs
        self.norms = self.norms.merge(other.norms)
        if self.moments is None or self.sums is None:
            self.moments, self.sums = other.moments, other.sums
        elif other.moments is not None and other.sums is not None:
            device = self.moments.device  # another process sends tensors on the CPU
            self.moments = self.moments + other.moments.to(device)
            self.sums = self.sums + other.sums.to(device)


@dataclass
class Watched:
    """A weight of a loaded unit, as the original and as the candidates have it, in the same memory layout."""

    name: str
    weight: Tensor
    others: list[Tensor | None]  # None for a candidate whose weight is equal


Part = tuple[str, int, tuple[int, ...]]  # a weight's name, the offset of the part in it, its shape


@dataclass
class Use:
    """A product that the model computed with a watched weight, or with a part of it."""

    watched: Watched
    product: Product
    weight: Tensor
    transposed: bool

    @property
    def key(self) -> Part:
        """The identity of the part: the name of its weight, its offset and its shape."""
        return self.watched.name, int(self.weight.storage_offset()), tuple(self.weight.shape)

    def others(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the weight of each candidate whose weight differs."""
        begin = self.weight.storage_offset() - self.watched.weight.storage_offset()
        for n, other in enumerate(self.watched.others):
            if other is not None:
                yield n, other.as_strided(self.weight.size(), self.weight.stride(), other.storage_offset() + begin)

    def errors(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the error (in, out) of each candidate whose weight differs, one at a time."""
        for n, other in self.others():
            error = other - self.weight
            yield n, error if self.transposed else error.t()

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.weight.shape[1 if self.transposed else 0]


class OutputErrors(TorchFunctionMode):
    """Computes the output errors of a unit's weights while the original's unit runs, on its inputs.

    For a stacked expert, only the inputs that are routed to it count.

    ‖X Eᵀ‖² is computed directly, or as Σ (E XᵀX) ∘ E if that takes fewer multiplications: XᵀX is shared by weights with
    the same inputs, by all candidates and by all micro-batches. Stacked experts have few inputs each, so theirs are
    computed directly. X is kept, not copied, until it is used: models that can be trained do not change it in place.
    """

    def __init__(self, products: dict[str, Product], inputs: int, with_moments: bool) -> None:
        """Add results to ``products``, by names of the model, with moments of the inputs if ``with_moments``.

        ``inputs`` is the number of tokens in all micro-batches.
        """
        super().__init__()
        self._products, self._inputs, self._with_moments = products, inputs, with_moments
        self._watched: dict[int, Watched] = {}
        self._x: Tensor | None = None
        self._norms = NO_NORMS  # norms of self._x
        self._uses: list[Use] = []  # products with x whose errors have not been computed yet
        self._gram: dict[tuple[Part, ...], Gram] = {}  # by the parts of weights that share the inputs
        self._later: list[tuple[Use, Gram]] = []  # errors to multiply by XᵀX once all micro-batches have run

    def watch(self, unit: Unit, others: Sequence[Mapping[str, Tensor]]) -> None:
        """Watch a unit that is loaded; ``others`` are the same weights of each candidate."""
        self._watched, self._gram, self._later = {}, {}, []
        for slot in unit.slots:
            weight = slot.tensor
            if weight.dim() < 2 or slot.is_buffer:
                continue
            same_layout = [_find_difference(other[slot.name], weight) for other in others]
            self._watched[storage_of(weight)] = Watched(slot.name, weight, same_layout)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        if error is None:
            self._settle()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for values, weight, transposed in products_of(function, args):
            watched = self._watched.get(storage_of(weight))
            if watched is not None:
                with torch._C.DisableTorchFunction():
                    self._add(watched, values, weight, transposed, _subtract_bias(function, args, kwargs, output))
        for values, stack in stacked_products_of(function, args):
            watched = self._watched.get(storage_of(stack))
            if watched is not None:
                with torch._C.DisableTorchFunction():
                    for expert, matrix in enumerate(stack):
                        self._add(watched, values[expert], matrix, True, output[expert])
        return output

    def _add(self, watched: Watched, values: Tensor, weight: Tensor, transposed: bool, output: Tensor) -> None:
        product = self._products.get(watched.name)
        if product is None:
            product = Product(0.0, [0.0] * len(watched.others), watched.weight.dim() > 2, transposed=transposed)
            self._products[watched.name] = product
        use = Use(watched, product, weight, transposed)
        if values.is_floating_point():
            flat = values.reshape(-1, values.shape[-1])
            rows = flat.shape[0]
            if self._with_moments:
                moments, sums = flat.square().sum(0, dtype=torch.float64), flat.sum(0, dtype=torch.float64)
                product.moments = moments if product.moments is None else product.moments + moments
                product.sums = sums if product.sums is None else product.sums + sums
            if self._x is None or self._x.data_ptr() != flat.data_ptr() or self._x.shape != flat.shape:
                self._settle()
                self._norms = norms_of(flat)
            product.norms = product.norms.merge(self._norms)
            self._x = flat
            self._uses.append(use)
        else:
            rows = values.numel()
            looked_up = values.reshape(-1)
            for n, other in use.others():
                product.noise[n] += sum_squares(other[looked_up] - weight[looked_up])
        product.inputs += rows
        product.signal += sum_squares(output)

    def _settle(self) -> None:
        """Compute the errors of the products with x; called when x changes, and at the end of a micro-batch."""
        x, uses = self._x, self._uses
        self._x, self._uses = None, []
        if x is None or not any(other is not None for use in uses for other in use.watched.others):
            return
        outputs = sum(use.outputs for use in uses)
        if uses[0].product.is_stack or not Gram.is_cheaper(x.shape[1], self._inputs, outputs):
            for use in uses:
                for n, error in use.errors():
                    slabs = torch.split(x, max(SLAB_ELEMENTS // max(error.shape[1], 1), 1))
                    use.product.noise[n] += fsum(sum_squares(multiply(slab, error.t())) for slab in slabs)
            return
        keys = tuple(use.key for use in uses)
        gram = self._gram.get(keys)
        if gram is None:
            gram = self._gram[keys] = Gram(x.shape[1], x.device)
            self._later += [(use, gram) for use in uses]
        gram.add(x)

    def finish(self) -> None:
        """Compute the errors that use XᵀX; called after the last micro-batch."""
        for use, gram in self._later:
            for n, error in use.errors():
                use.product.noise[n] += gram.energy(error.t())
        self._later = []


def _find_difference(other: Tensor, weight: Tensor) -> Tensor | None:
    """Return a candidate's weight in the dtype and memory layout of the original's; None if both are equal."""
    converted = other.to(weight.dtype)
    if torch.equal(converted, weight):
        return None
    if converted.stride() == weight.stride():
        return converted
    return torch.empty_strided(converted.shape, weight.stride(), dtype=converted.dtype, device=converted.device).copy_(
        converted
    )


def sum_squares(values: Tensor) -> float:
    """Return the sum of squares, added up in the dtype of the values along rows and in float64 over rows."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return float(norms.double().square().sum())


def _subtract_bias(function: object, args: Sequence[Tensor], kwargs: Any, output: Tensor) -> Tensor:
    """Return the product without its bias."""
    bias = None
    if function is F.linear:
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
    elif function is torch.addmm:
        bias = args[0]
    return output if bias is None else output - bias


def storage_of(weight: Tensor) -> int:
    """Return the address of a weight's memory, which is that of its views, too; 0 on the meta device."""
    return 0 if weight.device.type == "meta" else weight.untyped_storage().data_ptr()


def products_of(function: object, args: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the inputs and the weight of a product that a model computes, and whether the weight is [in, out]."""
    if function is F.linear or (function is F.embedding and len(args) > 1):
        yield args[0], args[1], False
    elif function is torch.addmm and len(args) > 2:
        yield args[1], args[2], True
    elif function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm) and len(args) > 1:
        weight = args[1]
        if isinstance(weight, Tensor) and weight.dim() == 2:
            is_view = weight.stride(0) < weight.stride(1)  # weight.t(), whose memory is [out, in]
            yield args[0], weight.t() if is_view else weight, not is_view


def stacked_products_of(function: object, args: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs (experts, n, in) and weights (experts, in, out) of a product that computes all experts at once."""
    if function in (torch.bmm, torch.Tensor.bmm) and len(args) > 1 and isinstance(args[1], Tensor):
        yield args[0], args[1]
