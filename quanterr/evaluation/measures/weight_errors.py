"""The errors of the outputs of all weights of a model, by candidate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from torch import Tensor

from quanterr.documents.evaluation.model import WeightError
from quanterr.evaluation.measures.outputs_of_weights import Product
from quanterr.evaluation.models.names import Get, Names
from quanterr.util.text import display


@dataclass
class WeightErrors:
    """The products of the weights of a model with their inputs, by parameter."""

    names: Names
    products: dict[str, Product] = field(default_factory=dict)
    unit_of: dict[str, str] = field(default_factory=dict)

    def rows(self, n: int, of_inputs: Mapping[str, float]) -> list[WeightError]:
        """Return the output errors of the weights of candidate ``n``, the largest first.

        ``of_inputs`` are the squared changes of outputs by its rounded inputs, by parameter.
        """
        totals: dict[str, float] = {}
        for name, product in self.products.items():
            totals[self.unit_of[name]] = totals.get(self.unit_of[name], 0.0) + product.noise[n]
        rows = []
        for stored, names in self._by_stored_name().items():
            products, unit = [self.products[name] for name in names], self.unit_of[names[0]]
            noise, total = sum(product.noise[n] for product in products), totals[unit]
            signal = sum(product.signal for product in products)
            rounded = [of_inputs[name] for name in names if name in of_inputs]
            known = 0 < signal < inf and isfinite(noise)
            of_both = sum(rounded) + noise
            rows.append(
                WeightError(
                    layer_name=stored,
                    display_name=display(stored),
                    block=unit,
                    output_error=noise / signal if known else None,
                    share_of_block=noise / total if known and total > 0 else None,
                    inputs=max(product.inputs for product in products),
                    predicted_kld=None,
                    input_error=sum(rounded) / signal if known and rounded else None,
                    share_of_inputs=sum(rounded) / of_both if known and rounded and of_both > 0 else None,
                    input_spread=max((product.norms.spread or 0.0 for product in products), default=0.0) or None,
                )
            )
        return sorted(rows, key=lambda row: (row.output_error is not None, -(row.output_error or 0.0)))

    def _by_stored_name(self) -> dict[str, list[str]]:
        """Return the watched parameters by stored name, as several of them may be rows of one tensor."""
        parameters: dict[str, list[str]] = {}
        for name in self.products:
            parameters.setdefault(self.names.stored_name(name), []).append(name)
        return parameters

    def moments(self) -> Mapping[str, Product]:
        """Return the second moments of the inputs of each weight, by stored names."""
        return {stored: self._merge(names) for stored, names in self._by_stored_name().items()}

    def weights(self, get: Get) -> Iterator[tuple[str, Tensor, Product]]:
        """Read again each weight that had inputs; yield its stored name, values and product."""
        for stored, parts in self._by_stored_name().items():
            values = self.names.tensors(parts, get)[parts[0]] if len(parts) == 1 else get(stored)
            yield stored, values, self._merge(parts)

    def _merge(self, names: Sequence[str]) -> Product:
        """Return the product of a weight that is split into several parameters with the same inputs."""
        first = self.products[names[0]]
        if len(names) == 1:
            return first
        products = [self.products[name] for name in names]
        noise = [sum(each) for each in zip(*(product.noise for product in products), strict=True)]
        return replace(first, signal=sum(product.signal for product in products), noise=noise)

    def merge(self, products: Mapping[str, Product]) -> None:
        """Add another process's sums over its share of the micro-batches."""
        for name, product in products.items():
            if name in self.products:
                self.products[name].add(product)
            else:
                self.products[name] = product
