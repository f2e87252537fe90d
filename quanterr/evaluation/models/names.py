"""Which stored tensors make up each parameter of a model.

ConversionNames  models of transformers: its own tables of conversions join experts and rename modules
                 (transformers 5, src/transformers/core_model_loading.py)
LayoutNames      denoisers of diffusers: a layout lists the rows of tensors that make up a parameter (layouts.py)
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quanterr.errors import CheckpointError
from quanterr.evaluation.models.layouts import Layout, Rows
from quanterr.tensors.memory import room_for_weight
from quanterr.util.text import itemize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Get = Callable[[str], Tensor]  # returns the tensor of a stored name


class Names(ABC):
    """Maps parameters of a model to the stored tensors of one checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        """Find the parameters, and which of them are tied."""
        self.known: dict[str, Tensor] = model.state_dict()
        self._twins = find_twins(model)

    def missing(self) -> list[str]:
        """Return the parameters for which nothing is stored."""
        return [name for name in self.known if self._source(name) is None]

    def stored_name(self, name: str) -> str:
        """Return the stored name of a parameter, or its name in the model if several tensors make it up.

        Parameters that are parts of one tensor have the same stored name.
        """
        sources = self.sources(name)
        return sources[0] if len(sources) == 1 else name

    @abstractmethod
    def sources(self, name: str) -> list[str]:
        """Return the stored names of the tensors that make up a parameter."""

    @abstractmethod
    def tensors(self, names: Iterable[str], get: Get) -> dict[str, Tensor]:
        """Return parameters by their names in the model; ``get`` dequantizes a stored tensor.

        Raises:
            CheckpointError: nothing is stored for one of them.
        """

    @abstractmethod
    def _is_stored(self, name: str) -> bool:
        """Return whether a parameter itself is stored."""

    def _source(self, name: str) -> str | None:
        """Return the first parameter that is stored, of this one and those tied to it; None if none is."""
        return next((twin for twin in (name, *self._twins.get(name, ())) if self._is_stored(twin)), None)

    def _find_source(self, name: str) -> str:
        """Return the first parameter that is stored, of this one and those tied to it.

        Raises:
            CheckpointError: nothing is stored.
        """
        source = self._source(name)
        if source is None:
            raise CheckpointError(f"no tensor is stored for {itemize([name])} of the model")
        return source


class ConversionNames(Names):
    """The stored names of a checkpoint of transformers, assigned to parameters by transformers' conversions."""

    def __init__(self, model: "PreTrainedModel", stored: Iterable[str]) -> None:
        """Assign every stored name to the parameter that it is part of."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(model)
        renamings = [row for row in mapping if isinstance(row, WeightRenaming)]
        converters = [row for row in mapping if isinstance(row, WeightConverter)]
        by_pattern = {pattern: row for row in converters for pattern in row.source_patterns}
        super().__init__(model)
        self.model = model
        self.stored_names: dict[str, str] = {}  # name in the model → stored name
        # first parameter → converter, pairs of pattern and stored name
        self.conversions: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, self.known)
            if name not in self.known and key in self.known:
                name, pattern = key, None
            if name not in self.known:
                continue
            if pattern is None:
                self.stored_names[name] = key
            else:
                self.conversions.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, key))
        self.first_of: dict[str, str] = {}  # parameter → the first one that the same conversion makes
        for first, (converter, _) in self.conversions.items():
            hit = next((target for target in converter.target_patterns if target in first), None)
            for target in converter.target_patterns:
                self.first_of[first.replace(hit, target, 1) if hit else first] = first

    def sources(self, name: str) -> list[str]:
        """Return the stored names of the tensors that make up a parameter."""
        source = self._source(name)
        if source is None:
            return []
        if source in self.stored_names:
            return [self.stored_names[source]]
        return [key for _, key in self.conversions[self.first_of[source]][1]]

    def tensors(self, names: Iterable[str], get: Get) -> dict[str, Tensor]:
        """Return parameters by their names in the model; ``get`` dequantizes a stored tensor.

        Raises:
            CheckpointError: nothing is stored for one of them.
        """
        wanted, parameters = list(names), dict[str, Tensor]()
        for name in wanted:
            if name in parameters:
                continue
            source = self._find_source(name)
            if source in self.stored_names:
                parameters[name] = get(self.stored_names[source])
            else:
                converted = self._convert(self.first_of[source], get)
                parameters |= {other: tensor for other, tensor in converted.items() if other in wanted}
                parameters.setdefault(name, converted[source])
        return parameters

    def _convert(self, first: str, get: Get) -> dict[str, Tensor]:
        """Run the conversion that makes a parameter and others with it."""
        converter, keys = self.conversions[first]
        converter = deepcopy(converter)
        for pattern, key in keys:
            converter.add_tensor(first, key, pattern, partial(get, key))
        converted = converter.convert(first, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}

    def _is_stored(self, name: str) -> bool:
        return name in self.stored_names or name in self.first_of


class LayoutNames(Names):
    """The stored names of a denoiser's checkpoint, assigned to parameters by a layout."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Keep the layout, with the tied parameters of the model."""
        super().__init__(model)
        self._pieces = layout.parameters

    def sources(self, name: str) -> list[str]:
        """Return the stored names of the tensors that make up a parameter."""
        source = self._source(name)
        return [] if source is None else list(dict.fromkeys(rows.source for rows in self._pieces[source]))

    def tensors(self, names: Iterable[str], get: Get) -> dict[str, Tensor]:
        """Return parameters by their names in the model; ``get`` dequantizes a stored tensor, once for all its parts.

        Raises:
            CheckpointError: nothing is stored for one of them.
        """
        pieces = {name: self._pieces[self._find_source(name)] for name in names}
        uses = Counter(rows.source for parts in pieces.values() for rows in parts)
        read, parameters = dict[str, Tensor](), dict[str, Tensor]()
        for name, parts in pieces.items():
            cut = []
            for rows in parts:
                if rows.source not in read:
                    read[rows.source] = get(rows.source)
                cut.append(_cut(read[rows.source], rows))
                uses[rows.source] -= 1
                if not uses[rows.source]:
                    del read[rows.source]
            parameters[name] = cut[0] if len(cut) == 1 else torch.cat(cut)
        return parameters

    def _is_stored(self, name: str) -> bool:
        return name in self._pieces


def _cut(whole: Tensor, rows: Rows) -> Tensor:
    """Return a copy of rows of a tensor, as parts of a weight must not share memory (see storage_of)."""
    if not whole.dim() or rows.n == len(whole):
        return whole
    part = whole[rows.first : rows.first + rows.n]
    return room_for_weight((1, part.numel()), whole.device).view(part.shape).copy_(part)


def find_twins(model: nn.Module) -> dict[str, list[str]]:
    """Return for each parameter the names of the others that are tied to it, which are the same object."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: [twin for twin in names if twin != name] for names in by_id.values() for name in names}
