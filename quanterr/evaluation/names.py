"""Which stored tensors make up a parameter of the model, by transformers' own tables of conversions.

So fused experts and renamed modules need no table of ours (transformers 5, src/transformers/core_model_loading.py).
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from quanterr.errors import CheckpointError
from quanterr.util.text import listed

Get = Callable[[str], Tensor]  # the tensor of a stored name


class Names:
    """Stored names and the model's names of one checkpoint."""

    def __init__(self, model: Any, stored: Iterable[str]) -> None:
        """Sort every stored name to the parameter that it is part of."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        own = hasattr(model, "base_model_prefix")  # models of diffusers are stored under their own names
        mapping = get_model_conversion_mapping(model) if own else []
        renamings = [row for row in mapping if isinstance(row, WeightRenaming)]
        converters = [row for row in mapping if isinstance(row, WeightConverter)]
        by_pattern = {pattern: row for row in converters for pattern in row.source_patterns}
        self.model: Any = model
        self.known: dict[str, Tensor] = model.state_dict()
        self.plain: dict[str, str] = {}  # name in the model → stored name
        self.made: dict[str, tuple[Any, list[tuple[str, str]]]] = {}  # first name → converter, (pattern, stored name)s
        self.unexpected: list[str] = []
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, getattr(model, "base_model_prefix", ""), self.known
            )
            if name not in self.known and key in self.known:
                name, pattern = key, None
            if name not in self.known:
                self.unexpected.append(key)
            elif pattern is None:
                self.plain[name] = key
            else:
                self.made.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, key))
        self.first_of: dict[str, str] = {}  # of parameters that one conversion makes together
        for first, (converter, _) in self.made.items():
            hit = next((target for target in converter.target_patterns if target in first), None)
            for target in converter.target_patterns:
                self.first_of[first.replace(hit, target, 1) if hit else first] = first
        self.twins = _twins(model)

    def missing(self) -> list[str]:
        """Parameters for which nothing is stored."""
        return [name for name in self.known if self._source(name) is None]

    def sources(self, name: str) -> list[str]:
        """Stored names that a parameter is made of."""
        source = self._source(name)
        if source is None:
            return []
        return [self.plain[source]] if source in self.plain else [key for _, key in self.made[self.first_of[source]][1]]

    def stored_name(self, name: str) -> str:
        """The stored name of a parameter; its own where several stored tensors make it up."""
        sources = self.sources(name)
        return sources[0] if len(sources) == 1 else name

    def tensors(self, names: Iterable[str], get: Get) -> dict[str, Tensor]:
        """Parameters by their names in the model; ``get`` dequantizes a stored one.

        Raises:
            CheckpointError: nothing is stored for one of them.
        """
        wanted, found = list(names), dict[str, Tensor]()
        for name in wanted:
            if name in found:
                continue
            source = self._source(name)
            if source is None:
                raise CheckpointError(f"no tensor is stored for {listed([name])} of the model")
            if source in self.plain:
                found[name] = get(self.plain[source])
            else:
                made = self._converted(self.first_of[source], get)
                found |= {other: tensor for other, tensor in made.items() if other in wanted}
                found.setdefault(name, made[source])
        return found

    def _converted(self, first: str, get: Get) -> dict[str, Tensor]:
        converter, keys = self.made[first]
        converter = deepcopy(converter)
        for pattern, key in keys:
            converter.add_tensor(first, key, pattern, partial(get, key))
        made = converter.convert(first, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def _source(self, name: str) -> str | None:
        """The parameter itself, or one that is tied to it, whichever is stored."""
        every = (name, *self.twins.get(name, ()))
        return next((twin for twin in every if twin in self.plain or twin in self.first_of), None)


def _twins(model: nn.Module) -> dict[str, list[str]]:
    """Parameters that are one object: tied ones."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: [twin for twin in names if twin != name] for names in by_id.values() for name in names}
